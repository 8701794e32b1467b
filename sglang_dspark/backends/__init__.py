"""What SGLang's attention backends can do in a verify forward, and ragged windows on Triton.

    table.py   one line a backend: which verify modes it serves, and why not the others
    choose.py  at start: serve the mode asked for, refuse in one line, or fall back as asked
    triton.py  SGLang's Triton backend, reading ragged windows

Words. A verify forward is *uniform* where every window has all W = gamma + 1 rows (static,
cap-accept), and *ragged* where windows have lengths of their own and their rows are packed one
after the other (compact). SGLang's `RaggedVerifyLayout` describes the latter.
"""

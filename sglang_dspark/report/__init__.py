"""`sglang-dspark report`: what a server's decode rounds did, on the terminal and as one HTML file.

    records file -> records ┐
                            ├-> tally, steps, reliability -> summary.Report -> terminal, html, JSON
    live server  -> server  ┘

Words: a window is the tokens of one request in a verify forward, its anchor included; what it
commits counts the bonus token, so that both are 1 at least.
"""

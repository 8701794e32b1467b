"""How to train a small DSPARK draft for a target, from the target alone.

    python -m sglang_dspark.recipe --out DIR --minutes N

One module a stage: generate (the target writes its own data), features (one target forward per
conversation, cached), train, evaluate, export. target.py and draft.py are the two models, loss.py
and batches.py what a training step is made of, initialise.py what the draft knows before it.
"""

"""SGLang without an accelerator: platform, attention, KV pool and threads for the CPU."""

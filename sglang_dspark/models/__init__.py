"""Draft architectures that SGLang 0.5.23 does not have; `plugin.register_models` announces them."""

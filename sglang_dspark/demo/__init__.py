"""What a machine without a GPU needs to try the package: a small real target model."""

from sglang_dspark.demo.model import DemoModelError, prepare_demo_model

__all__ = ["DemoModelError", "prepare_demo_model"]

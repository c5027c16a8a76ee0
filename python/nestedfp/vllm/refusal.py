"""What is registered in the plugin's place where it cannot run: the reason, as an error once a model asks for nestedfp.
Without it a nested checkpoint would be taken for the plain FP8 one that its upper bytes are."""

from __future__ import annotations

import logging
from typing import Any


def register(why: str) -> None:
    # These two are what vLLM offers to plugins; everything else may have moved.
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    logging.getLogger("vllm.nestedfp").warning("%s", why)

    class RefusedConfig(QuantizationConfig):
        def __new__(cls, *_: Any, **__: Any) -> RefusedConfig:
            raise ValueError(why)

        @classmethod
        def get_name(cls) -> str:
            return "nestedfp"

        @classmethod
        def get_supported_act_dtypes(cls) -> list[Any]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> RefusedConfig:
            return cls()

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, *_: Any,
                                         hf_config: Any = None, **__: Any) -> str | None:
            nested = getattr(hf_config, "nestedfp", None) is not None
            if user_quant == "nestedfp" or (nested and user_quant is None):
                raise ValueError(why)
            return None

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            raise ValueError(why)

    register_quantization_config("nestedfp")(RefusedConfig)

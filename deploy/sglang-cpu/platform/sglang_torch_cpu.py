"""SGLang platform plugin `torch_cpu`: every operation in plain torch on the CPU.

SGLang finds it by its entry point and calls `activate()` when SGLANG_PLATFORM=torch_cpu. Importing this module also makes
`import torchvision` possible beside a CPU build of torch; scripts that use transformers in this environment import it first.
"""

import torch

# The published torchvision is a CUDA build. Its compiled part does not load here, and its Python part then fails to describe
# two operators nobody declared. Declaring them, without an implementation, is all that its import needs.
_SCHEMAS = torch.library.Library("torchvision", "FRAGMENT")
for _operator in ("nms", "qnms"):
    _SCHEMAS.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def activate() -> str:
    """Where SGLang finds the platform class."""
    return f"{__name__}:TorchCpuPlatform"


def _platform_class() -> type:
    # SGLang imports this module while its own platform package is half loaded, so its classes are imported on first use.
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        """A CPU that is not SGLang's own CPU platform: that one needs the compiled sgl_kernel."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        capabilities = PlatformCapabilities()  # none: no graphs, no fused kernels

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device=None) -> bool:
            return False

    return TorchCpuPlatform


def __getattr__(name: str) -> type:
    if name != "TorchCpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _platform_class())

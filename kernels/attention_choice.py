"""Which of torch's own attention kernels a process may use on a GPU."""

import torch


def for_device(device: str) -> None:
    """No cuDNN's on a GPU, for the whole process: it makes a plan for each shape in each thread, which takes tenths of
    a second, and texts have many lengths. torch prefers it from Hopper GPUs on."""
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)

"""What AOTInductor makes: its packages, and runs of them.

torch's own loader holds the interpreter's lock during a run, so that a replica would hear and say nothing for as long
as a batch takes. The library's C interface, which ctypes calls without the lock, is the same one that the loader uses:
other threads of Python go on.
"""

import ctypes
import shutil
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch._C import _aoti

_to_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_to_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def unpack(archive: Path) -> None:
    """Replace `archive` by the folder of its content.

    A packed one would be unpacked to /tmp by every load, and stay there when the process is killed. The compiler's own
    copy of the library, weights and all, goes too.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # TorchInductor takes 2 s: only who compiles pays

    with zipfile.ZipFile(archive) as packed:
        packed.extractall(archive.parent)
    archive.unlink()
    for library in archive.with_suffix("").rglob("*.so"):
        for copy in Path(cache_dir()).glob(f"*/{library.name}"):
            shutil.rmtree(copy.parent)


def load(package: Path) -> Callable[..., Tensor]:
    """The function of tensors, with one tensor as its result, in the unpacked `package`; calls must not overlap. Its
    weights go when it does.

    What goes wrong in a call is a RuntimeError, of which the library writes the reason to standard error. Raises
    OSError or RuntimeError if it cannot be loaded.
    """
    library = next(package.rglob("*.wrapper.so"), None)
    if library is None:
        raise FileNotFoundError(f"{package} has no *.wrapper.so")
    functions = ctypes.CDLL(str(library))
    try:
        create = functions.AOTInductorModelContainerCreateWithDevice
        run = functions.AOTInductorModelContainerRunSingleThreaded
        delete = functions.AOTInductorModelContainerDelete
    except AttributeError as error:
        raise OSError(f"{library} is no library of AOTInductor's: {error}") from None
    create.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    run.argtypes = [pointer, pointer, count, pointer, count, pointer, pointer]
    delete.argtypes = [pointer]
    container = ctypes.c_void_p()
    if create(ctypes.byref(container), 1, b"cpu", None):
        raise RuntimeError(f"{library} cannot be loaded; its reason is on standard error")

    def forward(*inputs: Tensor) -> Tensor:
        handles = (_to_pointer(_aoti.unsafe_alloc_void_ptr_from_tensor(each), None) for each in inputs)
        given = (ctypes.c_void_p * len(inputs))(*handles)
        result = (ctypes.c_void_p * 1)()
        if run(container, given, len(inputs), result, 1, None, None):
            shapes = ", ".join(f"{each.dtype} {list(each.shape)}" for each in inputs)
            raise RuntimeError(f"{library} failed on {shapes}; its reason is on standard error")
        found: Tensor = _aoti.alloc_tensor_by_stealing_from_void_ptr(_to_capsule(result[0], None, None))
        return found

    weakref.finalize(forward, delete, container).atexit = False
    return forward

"""A `triton` for machines that never run a kernel: everything can be imported, named, decorated and subscripted.

SGLang defines Triton kernels at import time also where they are never launched. Here any attribute and any sub-module exists:
names in CapWords are empty classes, other names are modules that can be called. A call with one function returns it, which is what
a decorator does; any other call returns such a decorator.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.0.0"


def _decorator(*args, **options):
    if len(args) == 1 and not options and callable(args[0]):
        return args[0]
    return lambda function: function


class _Nothing(types.ModuleType):
    """A module, function, decorator or generic type, whichever the importer takes it for."""

    __call__ = staticmethod(_decorator)

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        return _attribute(self, name)

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__


class _Empty:
    """Base of the classes; accepts any construction and any class keyword."""

    def __init__(self, *args, **options):
        pass

    def __init_subclass__(cls, **options):
        super().__init_subclass__()


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    full_name = f"{module.__name__}.{name}"
    if name[0].isupper():
        value = type(name, (_Empty,), {"__module__": module.__name__})
    else:
        value = sys.modules.setdefault(full_name, _Nothing(full_name))
    setattr(module, name, value)
    return value


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return sys.modules.get(spec.name) or _Nothing(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Importer())


def __getattr__(name):
    return _attribute(sys.modules[__name__], name)


# Used with values, not only named.
jit = autotune = heuristics = _decorator


def cdiv(dividend, divisor):
    return (dividend + divisor - 1) // divisor


def next_power_of_2(number):
    return 1 << max(0, number - 1).bit_length()


class _Constexpr(_Empty):
    def __init__(self, value=None):
        self.value = value


import triton.language as language  # noqa: E402

language.constexpr = _Constexpr

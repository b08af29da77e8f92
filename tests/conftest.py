"""What several tests need."""

import importlib.machinery
import importlib.util
import sys
import types

import pytest


class Anything(type):
    """A class that has whatever is asked of it."""

    def __getattr__(cls, name):
        return name


class Stub(types.ModuleType):
    """A module that has whatever is asked of it."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or Anything(name, (), {})


@pytest.fixture(scope="module")
def timm():
    """Timm needs torchvision to be imported, but nothing of it for the models of these tests."""
    names = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")
    names += (".models", ".models.feature_extraction")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            for name in names:
                stub = Stub(f"torchvision{name}")
                stub.__spec__ = importlib.machinery.ModuleSpec(stub.__name__, None)
                patch.setitem(sys.modules, stub.__name__, stub)
        yield pytest.importorskip("timm")


@pytest.fixture(autouse=True, scope="session")
def journals(tmp_path_factory):
    """No test leaves a journal in the folder of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP2_STATE", str(tmp_path_factory.mktemp("state")))
        yield

"""A version of torch that lacks what clipless needs is refused in words, when clipless is first used."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from clipless import UnsupportedModule
from clipless.distributed import shards
from clipless.errors import MissingLibrary, Misuse
from clipless.gradients.capture import refusals
from clipless.torch_internals import instance_norm_writes

# What is not there, and how it is taken away before clipless is imported.
MISSING = {
    "get_eval_frame_callback": "del torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "_current_graph_task_id": "del torch._C._current_graph_task_id",
    "_get_active_ddp_module": "del torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_a_version_lacks_is_named_with_the_versions_that_have_it(name: str) -> None:
    code = f"import torch; {MISSING[name]}\nimport clipless\nclipless.make_private"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        "clipless.errors.MissingLibrary: clipless is made for torch 2.6 to 2.15, and this is torch "
    ), last
    assert torch.__version__ in last
    assert f"'{name}'" in last
    assert "pip install 'torch>=2.6'" in last


def test_the_lowest_version_is_the_same_wherever_it_is_named() -> None:
    root = Path(__file__).parents[1]
    asked = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (one.removeprefix("torch>=") for one in asked if one.startswith("torch>"))
    for name in ("README.md", "docs/quickstart.md", "src/clipless/torch_internals.py"):
        assert f"torch {floor} to " in (root / name).read_text(), name


def test_sharded_models_need_a_torch_with_which_they_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in (("2.7.1+cu126", True), ("2.12.1", True), ("2.13.0+cpu", False), ("2.15.0+cu132", True)):
        monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
        with pytest.raises(
            MissingLibrary if refused else Misuse, match=r"need torch 2\.13" if refused else "not sharded"
        ):
            shards.refuse_shards(nn.Linear(1, 1), None)


def test_instance_norm_that_writes_in_eval_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.6, where its running statistics become their own mean over the records, which is rounded."""
    norm = nn.InstanceNorm2d(2, affine=True, track_running_stats=True).eval()
    assert norm.running_mean is not None
    before = norm.running_mean._version
    norm(torch.zeros(3, 2, 2, 2))
    assert instance_norm_writes() == (norm.running_mean._version != before)
    for writes in (False, True):
        monkeypatch.setattr(refusals, "instance_norm_writes", lambda writes=writes: writes)
        if writes:
            with pytest.raises(UnsupportedModule, match="track_running_stats=False"):
                refusals.refuse_module(norm, "norm")
        else:
            refusals.refuse_module(norm, "norm")

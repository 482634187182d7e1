"""Keys that move forward only: what they are, who has them, and that earlier ones are nowhere to be found."""

import copy
import hashlib
import io
import itertools
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import nn
from torch.utils.data import TensorDataset

import children
import clipless
from clipless import InvalidArgument, Misuse, Private
from clipless.app.training import TrainingSettings, save_run, train
from clipless.app.training.saving import Saving
from clipless.noise import NoiseSource
from clipless.noise import keys as key_chains
from clipless.noise import source as noise_sources
from clipless.noise.keys import STREAMS, Chain, ForwardKeys, SeededKeys, keys_of, keystream
from clipless.sampling.loader import PoissonSampler
from killing import blobs


def expanded(key: bytes, count: int) -> list[bytes]:
    """The keys that follow from one: AES-256 in counter mode from 0 on, 32 bytes each."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(32 * count))
    return [stream[start : start + 32] for start in range(0, 32 * count, 32)]


def chain(key: bytes, places: int) -> list[bytes]:
    """The keys of the first places."""
    keys = [key]
    while len(keys) < places:
        keys.append(expanded(keys[-1], 1)[0])
    return keys


FIRST = bytes(range(1, 33))


def test_a_chain_is_what_the_documentation_says() -> None:
    """Place by place and in jumps: each key is the beginning of what AES makes of the one before, its uses what follows."""
    keys = chain(FIRST, 20)
    for jumps in ([0, 1, 2, 3], [0, 0, 7, 7, 19], [19]):
        one = Chain(bytearray(FIRST))
        for place in jumps:
            assert one.at(place, 1) == expanded(keys[place], 2)[1]
            assert one.at(place, 2) == expanded(keys[place], 3)[2]
            assert one.at(19, 1) == expanded(keys[19], 2)[1], "ahead"
            one.forward(place)
            assert bytes(one._key) == keys[place]


def test_a_chain_that_is_moved_to_an_earlier_place_stays_where_it_is() -> None:
    """Else it would give the keys of one place under the number of another, and noise would be repeated."""
    keys, one = chain(FIRST, 9), Chain(bytearray(FIRST))
    for place, where in ((5, 5), (2, 5), (5, 5), (0, 5), (7, 7)):
        one.forward(place)
        assert (one.place, bytes(one._key)) == (where, keys[where])
        assert one.at(8, 1) == expanded(keys[8], 2)[1]
        with pytest.raises(Misuse, match="is gone"):
            one.at(where - 1, 1)


def test_no_two_uses_have_the_same_key() -> None:
    keys: list[ForwardKeys | SeededKeys] = [ForwardKeys(), ForwardKeys(), SeededKeys(0), SeededKeys(1), SeededKeys(11)]
    uses = itertools.product(keys, STREAMS, (0, 1, 10, 11, 111))
    found = [bytes(one.key(stream, place)) for one, stream, place in uses]
    assert len(set(found)) == len(found)
    assert {len(key) for key in found} == {32}


def test_first_keys_are_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([b"s" * 32, b"d" * 32])
    monkeypatch.setattr(os, "urandom", lambda count: next(given))
    keys = ForwardKeys()
    assert keys.key("gradient", 0) == expanded(b"s" * 32, 2)[1]
    assert keys.key("statistic", 0) == expanded(b"s" * 32, 3)[2]
    assert keys.key("sample", 0) == expanded(b"d" * 32, 2)[1]


def test_new_keys_are_of_the_operating_system_from_their_places_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain has a key of its own, which outlives those that it replaces."""
    given = iter([b"a" * 32, b"b" * 32, b"s" * 32, b"d" * 32, b"n" * 16])
    monkeypatch.setattr(os, "urandom", lambda count: next(given))
    source = NoiseSource("secure", ForwardKeys())
    old = source._keys
    source.renew(5, 7)
    keys = source._keys
    assert isinstance(old, ForwardKeys)
    assert bytes(old._steps._key) == bytes(old._draws._key) == bytes(32)
    assert keys.key("gradient", 5) == expanded(b"s" * 32, 2)[1]
    assert keys.key("statistic", 5) == expanded(b"s" * 32, 3)[2]
    assert source.sample_key(7) == expanded(b"d" * 32, 2)[1]
    for stream, place in (("gradient", 4), ("sample", 6)):
        with pytest.raises(Misuse, match=f"the key of place {place} is gone"):
            keys.key(stream, place)
    assert SeededKeys(3).renewed(5, 7).seed == int.from_bytes(b"n" * 16)


def test_a_key_is_moved_in_its_own_memory() -> None:
    memory = bytearray(FIRST)
    one = Chain(memory)
    one.forward(3)
    assert memory == chain(FIRST, 4)[3]
    one.erase()
    assert memory == bytes(32)


def test_a_state_gives_all_later_keys_and_none_earlier() -> None:
    keys = ForwardKeys()
    later = {(stream, place): bytes(keys.key(stream, place)) for stream in STREAMS for place in (5, 9)}
    keys.forget_steps(5)
    keys.forget_draws(5)
    saved = io.BytesIO()
    torch.save(keys.state(), saved)
    saved.seek(0)
    loaded = keys_of(torch.load(saved, weights_only=True))
    assert {place: bytes(loaded.key(*place)) for place in later} == later
    for stream in STREAMS:
        with pytest.raises(Misuse, match="the key of place 4 is gone: keys move forward only"):
            loaded.key(stream, 4)


def test_a_broken_state_is_refused() -> None:
    state = ForwardKeys().state()
    state.pop("draw_key")
    with pytest.raises(InvalidArgument, match="'draw_key' is missing"):
        keys_of(state)


def test_keys_are_not_copied() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(Misuse, match="cannot be copied or pickled"):
            copied(ForwardKeys())


FORKED = """
import os, sys
from clipless import Misuse
from clipless.noise import noise_source
import torch
secure = [noise_source() for _ in range(5)]
sources = [*secure, noise_source(seed=3)]
before = [source.release("gradient", 0, [torch.zeros(9)], [1.0])[0] for source in sources]
child = os.fork()
if not child:
    chains = [chain for source in secure for chain in (source._keys._steps, source._keys._draws)]
    gone = all(bytes(chain._key) == bytes(32) for chain in chains)
    same = torch.equal(sources[-1].release("gradient", 0, [torch.zeros(9)], [1.0])[0], before[-1])
    own = noise_source().release("gradient", 0, [torch.zeros(9)], [1.0])[0]
    for source in secure:
        try:
            source.release("gradient", 0, [torch.zeros(9)], [1.0])
        except Misuse as refused:
            gone = gone and "forked after make_private" in str(refused)
        else:
            os._exit(2)
    os._exit(0 if gone and same and len(own) == 9 else 1)
_, status = os.waitpid(child, 0)
after = [source.release("gradient", 0, [torch.zeros(9)], [1.0])[0] for source in sources]
sys.exit(os.waitstatus_to_exitcode(status) or not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
"""


def test_a_forked_child_has_no_keys() -> None:
    """A DataLoader's worker lives as long as an epoch: it must not keep the key that its parent has overwritten."""
    run = children.run_code(FORKED)
    assert run.returncode == 0, run.stderr


class Watched(SeededKeys):
    """Keeps what it hands out."""

    def __init__(self) -> None:
        super().__init__(3)
        self.handed_out: list[bytearray] = []

    def key(self, stream: str, place: int) -> bytearray:
        self.handed_out.append(super().key(stream, place))
        return self.handed_out[-1]


def test_whoever_has_used_a_key_erases_it() -> None:
    keys = Watched()
    source = NoiseSource("watched", keys)
    source.release("gradient", 0, [torch.zeros(9), torch.zeros(9, dtype=torch.float64)], [1.0, 2.0])
    source.release("statistic", 0, [torch.zeros(9)], [1.0])
    assert len(PoissonSampler(source, 1000, 0.1).indices(0)) > 0
    assert source.vector(0, 1, [torch.zeros(9)])[0].any()
    assert keys.handed_out == [bytearray(32)] * 4


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bytearray]:
    """Every key that is computed from another one while the test runs."""
    made: list[bytearray] = []

    def kept(key: bytes | bytearray, counter: int, size: int) -> bytearray:
        made.append(keystream(key, counter, size))
        return made[-1]

    for module in (key_chains, noise_sources):
        monkeypatch.setattr(module, "keystream", kept)
    return made


def test_of_a_chain_no_copy_of_a_key_stays_but_the_one_that_was_asked_for(
    copies: list[bytearray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the keys on the way to a later place, nor where the chain moves."""
    ahead: list[bytearray] = []
    replace = key_chains._replace

    def watched(key: bytearray) -> None:
        ahead.append(key)
        replace(key)

    monkeypatch.setattr(key_chains, "_replace", watched)
    one = Chain(bytearray(FIRST))
    asked = [one.at(0, 1), one.at(3, 2)]
    one.forward(2)
    assert [bytes(key) for key in asked] == [expanded(FIRST, 2)[1], expanded(chain(FIRST, 4)[3], 3)[2]]
    assert len(copies) == 7
    assert all(any(key is one for one in asked) or key == bytes(32) for key in copies)
    assert len(ahead) == 5
    assert all(key is one._key or key == bytes(32) for key in ahead)


def test_of_a_projection_no_key_stays(copies: list[bytearray]) -> None:
    source = NoiseSource("seeded", SeededKeys(3))
    first = source.vector(0, 1, [torch.zeros(9)])[0]
    (own,) = [key for key in copies if len(key) == 32]
    assert own == bytes(32)
    assert torch.equal(source.vector(0, 1, [torch.zeros(9)])[0], first)


# A run.


def attach(model: nn.Module, **changes: Any) -> tuple[torch.optim.Optimizer, Private]:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 8, "steps": 6, "accountant": "rdp"} | changes
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 3, generator=generator), torch.arange(40) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, clipless.make_private(model, optimizer, data, **settings)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, private: Private) -> Iterator[int]:
    for number, (x, y) in enumerate(private.loader):
        optimizer.zero_grad()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        yield number


def test_after_a_step_its_key_is_gone() -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e")
    keys = private._source._keys
    assert isinstance(keys, ForwardKeys)
    for number in steps(model, optimizer, private):
        for stream in STREAMS:
            with pytest.raises(Misuse, match="is gone"):
                keys.key(stream, number)
            keys.key(stream, number + 1)
    private.detach()


def test_a_detached_run_has_no_key() -> None:
    model = nn.Linear(3, 2)
    optimizer, private = attach(model)
    keys = private._source._keys
    assert isinstance(keys, ForwardKeys)
    list(itertools.islice(steps(model, optimizer, private), 3))
    private.detach()
    assert bytes(keys._steps._key) == bytes(keys._draws._key) == bytes(32)
    with pytest.raises(Misuse, match="no state to save: the run was detached"):
        private.state_dict()
    with pytest.raises(Misuse, match="detached and its keys are erased"):
        keys.key("gradient", 6)


KNOWN = """
import os, sys, itertools, time
import torch
torch.set_num_threads(1)
given, system = iter([1, 2]), os.urandom

def urandom(count):
    first = next(given) if count == 32 else 0
    return bytes((first * 31 + 7 * k) % 256 for k in range(32)) if first else system(count)

def wait_for(name):
    while not os.path.exists(f"{{name}}.seen"):
        time.sleep(0.01)

os.urandom = urandom
sys.path[:0] = {paths!r}
from noise.test_keys import attach, steps
from clipless.noise import source
if {numpy!r}:
    source.compiled = lambda: None
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer, private = attach(model, clipping="dc-e")
if {folder!r}:
    private.save_to({folder!r} + "/ledger.jsonl")
for number in steps(model, optimizer, private):
    if {folder!r} and number == 1:
        private.save_checkpoint({folder!r} + "/run.pt")
    print(number, flush=True)
    wait_for(number)
private.detach()
print("detached", flush=True)
wait_for("detached")
"""


def memory(process: int) -> Iterator[bytes]:
    """All that a process has in memory that it could have written to."""
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as content:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            place, rights, *_ = line.split()
            if "w" in rights:
                start, end = (int(edge, 16) for edge in place.split("-"))
                content.seek(start)
                try:
                    yield content.read(end - start)
                except OSError:
                    continue


def found(process: int, wanted: dict[str, bytes]) -> set[str]:
    """Which of these keys are in the memory of the process, at whatever place. By their first four bytes, all at once."""
    begins, goes_on = np.zeros(2**16, bool), np.zeros(2**16, bool)
    for key in wanted.values():
        begins[int.from_bytes(key[:2], "little")] = goes_on[int.from_bytes(key[2:4], "little")] = True
    seen: set[str] = set()
    for part in memory(process):
        for offset in (0, 1):
            pairs = np.frombuffer(part, "<u2", (len(part) - offset) // 2, offset)
            places = np.flatnonzero(begins[pairs[:-1]])
            for place in (2 * places[goes_on[pairs[places + 1]]] + offset).tolist():
                seen |= {name for name, key in wanted.items() if part[place : place + 32] == key}
    return seen


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the memory of a process cannot be read here")
@pytest.mark.parametrize("numpy", [False, True], ids=["compiled", "numpy"])
def test_from_all_that_is_in_memory_no_earlier_noise_can_be_computed(numpy: bool, tmp_path: Path) -> None:
    """The whole memory of a training process after a step, searched for every key there was and will be.

    Of each chain the key of the next place is there, which shows that the search would find others. Of earlier places
    there are neither the keys nor what is derived from them. Those that follow from the present key may be seen by chance.
    """
    starts = [bytes((first * 31 + 7 * k) % 256 for k in range(32)) for first in (1, 2)]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    script = KNOWN.format(paths=paths, numpy=numpy, folder="")
    wanted: dict[tuple[str, int], bytes] = {}
    for name, first in zip(("step", "draw"), starts, strict=True):
        for place, key in enumerate(chain(first, 7)):
            uses = expanded(key, 3)[1:]
            wanted |= {(name, place): key} | {(f"{name} use {use}", place): one for use, one in enumerate(uses)}
    names = {f"{name} {place}": key for (name, place), key in wanted.items()}
    (tmp_path / "known.py").write_text(script)
    process = children.Child(tmp_path / "known.py", cwd=tmp_path, notes=tmp_path)
    for number in range(6):
        process.wait_for(f"{number}\n")
        if number == 3:
            seen = found(process.pid, names)
            earlier = {f"{name} {place}" for name, place in wanted if place <= number}
            assert {f"step {number + 1}", f"draw {number + 1}"} <= seen
            assert not seen & earlier
        (tmp_path / f"{number}.seen").touch()
    process.wait_for("detached\n")
    assert not found(process.pid, names)
    (tmp_path / "detached.seen").touch()
    assert process.wait(60) == 0


def spellings(key: bytes) -> list[bytes]:
    numbers = int.from_bytes(key), int.from_bytes(key, "little")
    texts = [key.hex(), repr(key), str(list(key)), *map(str, numbers)]
    return [key, key[::-1], hashlib.sha256(key).digest(), *(text.encode() for text in texts)]


def test_a_checkpoint_holds_the_keys_of_its_own_step_and_no_earlier(tmp_path: Path) -> None:
    """Every byte of every file, and of the state, searched for every key in its usual spellings."""
    model = nn.Linear(3, 2)
    optimizer, private = attach(model, clipping="dc-e")
    private.save_to(tmp_path / "ledger.jsonl")
    keys = private._source._keys
    assert isinstance(keys, ForwardKeys)
    firsts = [bytes(keys._steps._key), bytes(keys._draws._key)]
    for number in steps(model, optimizer, private):
        private.save_checkpoint(tmp_path / "run.pt")
        files = b"\n".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
        for first in firsts:
            *earlier, present = chain(first, number + 2)
            assert present in files
            for key in earlier:
                assert not any(one in files for use in expanded(key, 3)[1:] for one in spellings(use))
                assert not any(one in files for one in spellings(key))
    private.detach()


def test_a_finished_run_holds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line's own functions: the folder, all files in it, and all that the keys of the run ever were."""
    firsts: list[bytes] = []
    system = os.urandom

    def urandom(count: int) -> bytes:
        firsts.append(system(count))
        return firsts[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    settings = TrainingSettings(model="linear", epochs=2, batch_size=32, accountant="rdp", clipping="dc-e")
    result = train(blobs(), settings, saving=Saving(tmp_path, every=0))
    assert (tmp_path / "checkpoint.pt").exists()
    save_run(result, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "model.pt", "run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["plan"]["noise"] == "secure"
    written = b"\n".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    taken = [first for first in firsts if len(first) == 32]
    assert len(taken) >= 2
    for first in taken:
        for key in chain(first, result.steps + 2):
            assert not any(one in written for use in expanded(key, 3) for one in spellings(use))
            assert not any(one in written for one in spellings(key))

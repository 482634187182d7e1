"""All compiled code: built with and without threads, checked before it is used, the same in any number of threads, and
safe in a forked child. What each function computes is tested beside its user."""

import importlib
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor

import children
from clipless.gradients.layers import conv_rows, norm_sums
from clipless.gradients.recurrent import compiled_lstm
from clipless.gradients.recurrent.cells import CELLS, Weights
from clipless.gradients.recurrent.recurrence import forward
from clipless.native import LIBRARY, SOURCES, gram, library, rows
from clipless.native.by_torch import Product, Weighted
from clipless.noise import adding, noise_source
from compiling import NO_NOISE, build_hook, loaded, needs_compiler, needs_library

pytestmark = needs_compiler

# For every source: what checks and loads it, and changes to it that the check must see.
CHECKED: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "noise.c": (
        adding.compiled,
        [
            ("NEXT_KEY(keys, 14, 0x40, 0xff)", "NEXT_KEY(keys, 14, 0x80, 0xff)"),
            ("NEXT_KEY(keys, 3, 0x00, 0xaa)", "NEXT_KEY(keys, 3, 0x00, 0xff)"),
            ("round < ROUNDS", "round < ROUNDS - 1"),
            ("chunk * BLOCKS", "0 * chunk"),
            ("-0.44445724953699084", "-0.44445724954"),
            ("-1.3862943611198906", "-1.38629436111989"),
            ("0x3fe6a09e667f3bcd", "0x3fe7000000000000"),
            ("0.002490394570188844", "0.00249039457018"),
            ("-0.30842513753404227", "-0.30842513753404"),
            ("(word & 4 ? y : x)", "(word & 8 ? y : x)"),
            ("word << 62 & 0x8000000000000000", "word << 61 & 0x8000000000000000"),
            ("noise[k] * stddev", "noise[k]"),
            ("(6ull << 52)", "(5ull << 52)"),
            ("noise + (place - from)", "noise"),
            ("+ (double)floats[k]", ""),
            ("+ doubles[k]", ""),
            ("(const float *)sums + at", "(const float *)sums"),
            ("(const double *)sums + at", "(const double *)sums"),
        ],
    ),
    "lstm.c": (
        compiled_lstm.compiled,
        [
            ("keep * c[at] + in", "keep * c[at] - in"),
            ("* (1.0f - keep)", "* (1.001f - keep)"),
            ("0.693359375f", "0.6934f"),
            ("out * seen;", "out * state;"),
            ("= cell * keep", "= cell * in"),
            ("grad->position + (row + r) * grad->record", "grad->position + r * grad->record"),
            ("if (t || to_state)", "if (t)"),
            ("(position + l->reverse) * l->records", "position * l->records"),
            ("ended * sizeof *cells", "0"),
            ("(rows - n) * 4 * l->width * sizeof", "0 * sizeof"),
            ("of_c + row * l.width", "of_c"),
            ("of_h + row * l.width", "of_h"),
            ("weights, l.width, 0, panels", "weights, l.width, 1, panels"),
            ("column / PANEL * PANEL * terms", "column / PANEL * terms"),
            ("panels + column * terms + k * PANEL", "panels + column * terms"),
            ("ROWS, !adds && !k", "ROWS, !adds"),
        ],
    ),
    "rows.c": (
        rows.compiled,
        [
            ("sums[chain] += numbers * numbers", "sums[chain] += numbers"),
            ("sums[0] += numbers * numbers", "sums[0] += numbers"),
            ("one[b] * other[b]", "one[b]"),
            ("norm * (float)scale", "norm"),
            ("norm <= (float)least ? 0 : INFINITY", "0"),
            ("found |= !counts", "found |= 0"),
            ("for (; k < width; k++)", "for (; k + 1 < width; k++)"),
            ("if (!keeps)", "if (keeps)"),
            ("fc * c[k] + fd * d[k]", "fc * c[k]"),
            ("float factor = factors[row] * scale", "float factor = factors[row]"),
            ("fb = factors[row + 1] * scale", "fb = factors[row + 1]"),
            ("for (; row < records; row++, a += width)", "for (; row + 1 < records; row++, a += width)"),
            ("if (!keeps)\n            memset", "if (keeps)\n            memset"),
            ("if (!keeps && !row)", "if (!keeps)"),
            ("sum[k] += chunk[k]", "sum[k] = chunk[k]"),
            ("sum[k] += run[k]", "sum[k] = run[k]"),
            ("a + row * width, factors + row", "a + row * width, factors"),
            ("rows + column + row * width, factors + row", "rows + column, factors + row"),
            ("sum->factors + run", "sum->factors"),
            ("factors[b] * scale : scale", "factors[b] : scale"),
            ("b++, right += width", "b++"),
            ("k < columns ? right[k] * factor : 0", "0"),
            ("room[k] = right[k] * factor;", "room[k] = right[k];"),
            ("if (!sum->rows && !sum->keeps)", "if (0)"),
            ("run || sum->keeps", "run"),
            ("run || sum->keeps", "sum->keeps"),
            ("left + t * apart", "left"),
            ("right + t * PANEL", "right"),
            ("count, !t)", "count, 1)"),
            ("total[row * width + k] += made", "total[row * width + k] = made"),
            ("columns < PANEL ? columns : PANEL) * sizeof *total", "columns < PANEL ? columns : 1) * sizeof *total"),
            ("first += BLOCK", "first += 2 * BLOCK"),
            ("sum->left + run * sum->outputs + first", "sum->left + run * sum->outputs"),
            ("apart = ROWS, tile = rows", "apart = ROWS, tile = ROWS"),
            ("(outputs - o) * sizeof *room", "0"),
            ("left + b * rows * outputs", "left"),
            ("right + b * rows * width", "right"),
            ("lengths_of(one.total, outputs * width", "lengths_of(one.total, width"),
        ],
    ),
    "conv.c": (
        conv_rows.compiled,
        [
            ("(c * height + y + s->above) * width + s->left", "(c * height + y + s->above) * width"),
            ("v * s->apart_v * width", "v * width"),
            ("run[u * s->apart_u]", "run[u]"),
            ("? s->outputs - o : ROWS, first == 0", "? s->outputs - o : ROWS, 1"),
            ("% s->columns * s->right", "% s->columns"),
            ("padded + (group * s->channels + c) * height", "padded + group * s->channels * height"),
            ("made + (group * s->outputs * s->channels + c)", "made + (group * s->outputs * s->channels)"),
            ("squared_length(made, s->groups * weights", "squared_length(made, weights"),
            ("+ s->left) * LANES", ") * LANES"),
            ("% s->wide * s->apart_u", "% s->wide"),
            ("/ s->wide * s->apart_v", "/ s->wide"),
            ("s->columns, s->down * width", "s->columns, width"),
            ("(top * s->down * width", "(top * width"),
            ("first = !top && !x", "first = !top"),
            ("first = !top && !x", "first = !x"),
            ("grad + top * s->columns + x", "grad + top * s->columns"),
            ("run * terms->right_run", "0"),
            ("run * terms->left_run", "0"),
            ("made + group * weights", "made"),
            ("* kernel + k, kernel)", "* kernel, kernel)"),
            ("b < (thread + 1) * s.records / threads", "b + 1 < (thread + 1) * s.records / threads"),
        ],
    ),
    "gram.c": (
        gram.compiled,
        [
            ("(ahead + lane > k) + (ahead + lane >= k)", "(ahead + lane > k) + 1"),
            ("ahead >= ROWS ? 2", "ahead >= ROWS ? 1"),
            ("(room - LANES) * width, 0, LANES", "(room - LANES) * width, 64, LANES"),
            ("rows - row : ROWS, k == 0", "rows - row : ROWS, 1"),
            ("first += STRIP", "first += positions"),
            ("g + first * of_g->position", "g + first * given->position"),
            ("+= sqrt(x * y)", "+= x * y"),
            ("x > found[2] || x != x ? x : found[2]", "x"),
            ("of_a->numbers + record", "given->numbers + record"),
            ("(of_a - given) * apart", "(of_a - given) * 4"),
            ("rows + row * step + k", "rows + row * width + k"),
            ("rows[row * step + k]", "rows[row * width + k]"),
        ],
    ),
    "layer_norm.c": (
        norm_sums.compiled,
        [
            ("centred ? sum_of", "!centred ? sum_of"),
            ("/ width + eps", "/ width + 1e-3f"),
            ("scale[k] += scales[k]", "scale[k] = scales[k]"),
            ("shifts[k] += g[k]", "shifts[k] += row[k]"),
            ("for (; k < width; k++)\n        total", "for (; k + 1 < width; k++)\n        total"),
        ],
    ),
}  # fmt: skip

DONE_WITHOUT = {"noise.c"} if NO_NOISE else set()
# Every module that takes a compiled function through the check.
USERS = sorted(
    ".".join(file.relative_to(SOURCES.parents[1]).with_suffix("").parts)
    for file in SOURCES.parent.rglob("*.py")
    if re.search(r"^compiled = checked\(", file.read_text("utf-8"), re.M)
)


def copied(folder: Path, source: str) -> Path:
    """A folder with what this source needs to be compiled, for one kind of processor."""
    folder.mkdir()
    for file in (SOURCES / source, *SOURCES.glob("*.h")):
        shutil.copy(file, folder / file.name)
    text = (folder / "processors.h").read_text()
    (folder / "processors.h").write_text(re.sub("(#define FOR_EACH_PROCESSOR).*", r"\1", text))
    return folder


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is not optimized, which takes the compiler less time."""
    flags = build_hook().FLAGS
    monkeypatch.setattr(build_hook(), "FLAGS", ["-O0" if flag == "-O3" else flag for flag in flags])


def read_once(header: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler reads this header once for all changes of the noise, instead of with each."""
    hook, file = build_hook(), folder / "first.h"
    file.write_text(f"#include <{header}>\n")
    flags = [*hook.THREADS[0], *hook.FLAGS, "-ffp-contract=off", "-x", "c-header"]
    subprocess.run(["cc", *flags, str(file), "-o", f"{file}.gch"], capture_output=True)
    monkeypatch.setattr(hook, "FLAGS", [*hook.FLAGS, "-include", str(file)])


def test_every_source_has_a_check() -> None:
    assert {source.name for source in SOURCES.glob("*.c")} == CHECKED.keys()


@pytest.mark.parametrize("user", USERS)
def test_every_compiled_function_is_there_and_passes_its_check(user: str) -> None:
    """With a compiler nothing falls back to torch or numpy unseen."""
    loaded(importlib.import_module(user))


def test_every_source_has_a_user() -> None:
    assert {load for load, _ in CHECKED.values()} <= {importlib.import_module(user).compiled for user in USERS}
    assert len(USERS) == len(CHECKED) + 1, "the noise is checked as a keystream and as a release"


@pytest.mark.parametrize("source", CHECKED)
def test_a_library_that_computes_anything_else_is_not_used(
    source: str, tmp_path: Path, quickly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right one as it is installed is tested above."""
    if source in DONE_WITHOUT:
        pytest.skip("it is not built here")
    load, changes = CHECKED[source]
    texts = {file.name: file.read_text() for file in (SOURCES / source, *SOURCES.glob("*.h"))}
    if source == "noise.c":
        read_once("immintrin.h", tmp_path, monkeypatch)
    for number, (old, new) in enumerate([*changes, ("", "")]):
        changed = next(name for name, text in texts.items() if old in text)
        folder, library = copied(tmp_path / str(number), source), tmp_path / f"{number}.so"
        if old:
            (folder / changed).write_text(texts[changed].replace(old, new))
        assert build_hook().compile_all(folder, library) is None
        assert (load(library) is None) == bool(old), (old, new)


TILED = ("conv.c", "gram.c", "lstm.c", "rows.c")
# How products are made in registers that this processor may not take: their changes.
WIDTHS = {
    512: [
        ("sums[row][v] += rows", "sums[row][0] += rows"),
        ("rows[row] = left + (row < count ? row : 0) * step", "rows[row] = left"),
    ],
    256: [
        ("halves, terms, made + row * width", "halves, terms, made"),
        ("row < count; row += ROWS / 2", "row < ROWS / 2; row += ROWS / 2"),
    ],
    128: [
        ("quarters, terms, made + row * width", "quarters, terms, made"),
        ("{0, 4, 8, 12}", "{0, 4, 8, 8}"),
        ("right + column, &terms", "right, &terms"),
    ],
}


@pytest.mark.parametrize("bits", WIDTHS)
def test_products_are_the_same_in_registers_of_every_width(bits: int, tmp_path: Path, quickly: None) -> None:
    """Compiled for processors of every kind, which have narrow ones: there the others are slow, and right."""
    for number, (old, new) in enumerate([*WIDTHS[bits], ("", "")]):
        (folder := tmp_path / str(number)).mkdir()
        for file in [*SOURCES.glob("*.h"), *(SOURCES / name for name in TILED)]:
            text = re.sub(r"(#define FOR_EACH_PROCESSOR\b).*", r"\1", file.read_text())
            text = re.sub(r"(#define REGISTER_BITS\b).*", rf"\1 {bits}", text)
            (folder / file.name).write_text(text.replace(old, new) if old else text)
        assert build_hook().compile_all(folder, tmp_path / f"{number}.so") is None
        loaded = [CHECKED[name][0](tmp_path / f"{number}.so") for name in TILED]
        assert (None in loaded) == bool(old), (old, new)


@pytest.mark.parametrize("source", CHECKED)
@pytest.mark.parametrize("content", [None, b"", b"not a library"], ids=["missing", "empty", "text"])
def test_a_library_that_cannot_be_loaded_is_done_without(source: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "_compiled.so").write_bytes(content)
    load, _ = CHECKED[source]
    assert load(tmp_path / "_compiled.so") is None


def test_a_library_without_the_functions_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    assert build_hook().compile_all(tmp_path, tmp_path / "other.so") is None
    for load, _ in CHECKED.values():
        assert load(tmp_path / "other.so") is None


def test_a_library_of_other_sources_is_warned_of_and_not_called(
    tmp_path: Path, quickly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions may take other arguments."""
    folder, stale = copied(tmp_path / "sources", "rows.c"), tmp_path / "stale.so"
    assert build_hook().compile_all(folder, stale) is None
    assert library.is_current(stale, folder)
    (folder / "rows.c").write_text((folder / "rows.c").read_text() + "\n")
    library.is_current.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", stale)
    monkeypatch.setattr(library, "SOURCES", folder)
    with pytest.warns(UserWarning, match="install clipless again"):
        assert library.function(stale, "clipless_norms") is None


def test_a_library_without_a_stamp_is_not_current(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "other.c", "-o", tmp_path / "other.so"], check=True)
    with pytest.warns(UserWarning, match="other sources"):
        assert not library.is_current(tmp_path / "other.so", tmp_path)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "cc -no-such-option"])
def test_without_a_working_compiler_the_build_says_why_and_leaves_nothing(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler)
    problem = build_hook().compile_all(SOURCES, tmp_path / "out.so")
    assert problem
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_without_threads_builds_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quickly: None
) -> None:
    """Then one thread does everything."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert build_hook().compile_all(SOURCES, tmp_path / "one.so") is None
    assert {name for name, (load, _) in CHECKED.items() if load(tmp_path / "one.so") is None} == DONE_WITHOUT


# Threads.


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results() -> list[Tensor]:
    """What all functions compute, on sizes that are worth several threads."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(64, 9001, generator=generator)
    total = torch.randn(9001, generator=generator)
    rows.add_rows([Weighted(total, gradients, torch.linspace(0, 1, 64), beta=1)])
    product = torch.zeros(201, 100)
    rows.add_products([Product(product, gradients[:, :201].clone(), gradients[:, :100].clone(), total[:64], beta=0)])
    states = torch.randn(16, 64, 200, generator=generator)
    lstm = torch.nn.LSTM(200, 100)
    with torch.no_grad():
        for weight in lstm.parameters():
            weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape))
    weights = Weights(*(p.detach() for p in lstm.parameters()), None)  # type: ignore[arg-type]
    zeros = torch.zeros(1, 64, 100)
    result = forward(CELLS["lstm"], [[weights]], states, (zeros, zeros), [64] * 16)
    noised = noise_source("seeded", 3).release("gradient", 5, [gradients, total], [0.5, 2.0])
    sums = norm_sums.norm_sums(states.transpose(0, 1).contiguous(), torch.ones(64, 16, 200), 1, 1e-5, centred=True)
    return [rows.squared_lengths([gradients]), total, product, result.output, *noised, *sums]


def test_no_result_depends_on_the_number_of_threads(restored: None) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results())
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))


@needs_library
@pytest.mark.parametrize("source", CHECKED)
def test_what_the_program_has_chosen_switches_nothing_off(source: str) -> None:
    """The check at first use computes in float32 in main memory, whatever new tensors are elsewhere, also under autocast."""
    load, _ = CHECKED[source]
    if source in DONE_WITHOUT:
        pytest.skip("it is not built here")
    load.cache_clear()  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            assert load(LIBRARY) is not None
            assert torch.empty(0).device.type == "meta"
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_there_are_threads_for_what_is_worth_it(restored: None) -> None:
    torch.set_num_threads(2)
    assert [library.threads(work) for work in (0, library.WORTH_A_THREAD - 1, 2 * library.WORTH_A_THREAD, 2**40)] == [
        1, 1, 2, 2,
    ]  # fmt: skip


FIND_THIS = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]!r}\n"


def in_a_process(script: str) -> None:
    """Run the script, which may import this file, in a process of its own; it ends with 0 if all is well."""
    done = children.run_code(FIND_THIS + dedent(script))
    assert done.returncode == 0, done.stderr


def test_torch_and_the_library_share_their_threads() -> None:
    """Two OpenMP libraries in one process would each keep the other's cores busy. In a fresh process: other packages that
    tests load bring theirs along."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("there is no list of what is loaded")
    script = """
        import torch
        from pathlib import Path
        from native.test_build import results
        torch.ones(10**6).sum()
        results()
        lines = Path("/proc/self/maps").read_text().splitlines()
        loaded = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}
        assert len(loaded) == 1, loaded
    """
    command = [sys.executable, "-c", FIND_THIS + dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_computes_the_same_and_never_waits() -> None:
    """OpenMP's threads are at work before the fork, and gone after it."""
    in_a_process("""
        import os, signal, sys
        import torch
        from clipless.native import library
        from native.test_build import results
        torch.set_num_threads(2)
        before = results()
        child = os.fork()
        if not child:
            signal.alarm(60)
            torch.set_num_threads(1)  # for torch's own
            library.torch.get_num_threads = lambda: 2
            same = all(torch.equal(a, b) for a, b in zip(before, results(), strict=True))
            os._exit(0 if same and library.threads(2**30) == 1 else 1)
        _, status = os.waitpid(child, 0)
        after = results()
        sys.exit(os.waitstatus_to_exitcode(status) or not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    """)


def test_noise_may_be_asked_for_first_in_a_forked_child() -> None:
    """The library is loaded and checked there, beside threads of torch's that are gone."""
    in_a_process("""
        import os, signal, sys
        import torch
        from clipless.noise import noise_source
        torch.set_num_threads(2)
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        sums = torch.zeros(10**6)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)
            (noised,) = noise_source("seeded", 3).release("gradient", 5, [sums], [2.0])
            os.write(writer, noised[-1000:].numpy().tobytes())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        (noised,) = noise_source("seeded", 3).release("gradient", 5, [sums], [2.0])
        sys.exit(os.waitstatus_to_exitcode(status) or os.read(reader, 4000) != noised[-1000:].numpy().tobytes())
    """)

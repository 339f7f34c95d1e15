#!/usr/bin/env python
"""Generation on the CPU: streamed by airtune, resident, by accelerate's disk_offload and by AirLLM.

    python scripts/bench_generate.py                     a random 0.6B model, batches of 1 and 8
    python scripts/bench_generate.py --checkpoint DIR --kinds airtune resident accelerate airllm \
        --airllm-python ~/airllm/bin/python --json result.json

All continue the same random prompts greedily, taking turns; ratios are between neighbours in time. AirLLM
runs in an environment of its own (`pip install airllm==4.0.0`) and, like disk_offload, computes on a copy of
the checkpoint that it writes first, into a temporary folder.

Hot: the files are in the page cache. Cold: before each pass over the weights a contender gives back the pages
that it has mapped and drops its files from the page cache (`mincore` says whether they are gone), so that
each token reads all weights from the disk. It is compared with the time that reading the checkpoint alone
takes then, by four threads, into buffers that are there already.

A pass over streamed weights costs much the same for one token as for several. So the second table lets
airtune verify guesses: `lookup` takes them from the text so far (prompt_lookup_num_tokens), `assistant` from
a small resident model (`--assistant DIR`). The prompt is a passage and the first half of it again, which
invites a trained model to go on copying. Models with a recurrent state cannot take guesses back: no table.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _bench import Contender, Figures, Peak, checkpoint, mb, serve, table, write_json

if TYPE_CHECKING:
    import torch

KINDS = ("airtune", "resident", "accelerate", "airllm")
GUESSES = 10  # tokens that a lookup proposes at a time
MOST_LEFT = 0.02  # of dropped files that the kernel may keep in memory: a page here and there


@dataclass
class Run:
    """What one contender did in one setting."""

    peak: Peak = field(default_factory=Peak)
    rounds: list[Figures] = field(default_factory=list)

    def median(self, name: str) -> float:
        return median(figures[name] for figures in self.rounds)


# The contender's side: any environment, so nothing of airtune above the functions.


def contend(
    kind: str, folder: Path, copy: Path | None, host_memory: str | None, assistant: Path | None
) -> None:
    """Load, then generate for each request."""
    import torch
    import transformers

    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print while they load is no answer
    counters: Callable[[], Mapping[str, float]] = dict
    if kind == "airtune":
        import airtune

        model: Any = airtune.load(folder, device="cpu", host_memory=host_memory)
        counters = airtune.stream_of(model).counters
    elif kind == "airllm":
        import airllm  # type: ignore[import-not-found]

        model = airllm.AutoModel.from_pretrained(
            str(folder), device="cpu", layer_shards_saving_path=str(copy)
        )
    else:
        model = resident(folder)
        if kind == "accelerate":
            from accelerate import disk_offload

            model = disk_offload(model, str(copy), execution_device=torch.device("cpu"))
    helper = resident(assistant) if assistant and kind == "airtune" else None
    files = [file for file in (copy or folder).rglob("*") if file.is_file()]
    transformers.utils.logging.set_verbosity_error()

    def answer(request: Mapping[str, int]) -> Figures:
        if not request["tokens"]:  # a rest: others measure with cold files, which must be mapped by nobody
            give_back_mapped()
            return {}
        passes = Passes(files if request["cold"] else ())
        options: dict[str, Any] = {}
        if request["guess"] == 1:
            options["prompt_lookup_num_tokens"] = GUESSES
        elif request["guess"] == 2:
            options["assistant_model"] = helper
        ids_BS = prompt(model.config, request)
        before = counters()
        passes.begin()
        out_BS = model.generate(
            input_ids=ids_BS,
            attention_mask=torch.ones_like(ids_BS),
            max_new_tokens=request["tokens"],
            min_new_tokens=request["tokens"],
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([passes]),
            **options,
        )
        new = out_BS[:, ids_BS.shape[1] :].flatten().tolist()
        moved = {
            name: counters()[name] - before[name] for name in ("bytes_read", "stall_s") if name in before
        }
        return {
            **passes.figures(),
            **moved,
            "checksum": float(hash(tuple(new)) % 10**9),
            "new": float(len(new)),
        }

    os.dup2(answers, 1)
    # transformers cannot take guesses back out of a recurrent state, and refuses.
    serve({"takes guesses": float(not getattr(model, "_is_stateful", False))}, answer)


def resident(folder: Path) -> Any:
    """transformers' own model with all weights in memory."""
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype="auto").eval()


def prompt(config: Any, request: Mapping[str, int]) -> torch.Tensor:
    """Ids [rows, length] without special ones, which are usually the last; a passage and half of it again."""
    import torch

    generator = torch.Generator().manual_seed(request["seed"])
    passage = torch.randint(
        3, config.get_text_config().vocab_size // 2, (request["rows"], request["length"]), generator=generator
    )
    return (
        torch.cat([passage, passage[:, : request["length"] // 2]], dim=1)
        if request["guess"] >= 0
        else passage
    )


class Passes:
    """A stopping criterion that stops nothing: it notes when a pass is over, and drops `files` before the
    next one.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = list(files)
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.left = 0.0

    def begin(self) -> None:
        if self.files:
            give_back_mapped()
            drop(self.files)
            self.left = max(self.left, share_in_memory(self.files))
        self.started = time.perf_counter(), time.process_time()

    def __call__(self, ids_BS: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        import torch

        self.walls.append(time.perf_counter() - self.started[0])
        self.cpus.append(time.process_time() - self.started[1])
        self.begin()
        return torch.zeros(len(ids_BS), dtype=torch.bool)

    def figures(self) -> Figures:
        """The first pass reads the prompt. CPU time is of all threads, so its mean says more than its median:
        some of what a pass costs is paid beside the next one.
        """
        later, cpu = self.walls[1:] or self.walls, self.cpus[1:] or self.cpus
        return {
            "first_s": self.walls[0],
            "pass_s": median(later),
            "cpu_s": sum(cpu) / len(cpu),
            "all_s": sum(self.walls),
            "passes": float(len(self.walls)),
            "left": self.left,
        }


def give_back_mapped() -> None:
    """Unmap the pages of data files from this process: while they are mapped the kernel keeps them."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if re.search(r"\.(safetensors|dat)$", name):
            begin, end = (int(address, 16) for address in place.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def drop(files: Iterable[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # what is still to be written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def share_in_memory(files: Iterable[Path]) -> float:
    """How much of the files is in the page cache, as mincore says."""
    libc, pages, there = ctypes.CDLL(None, use_errno=True), 0, 0
    for file in files:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < 2**20:
                continue
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            count = -(-size // mmap.PAGESIZE)
            states = ctypes.create_string_buffer(count)
            first = ctypes.c_char.from_buffer(memory)
            libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), states)
            pages, there = pages + count, there + count - states.raw[:count].count(0)
            del first
            memory.close()
    return there / max(1, pages)


# The side that watches.


def time_of_reading(folder: Path) -> float:
    """Seconds to read the checkpoint's files from the disk into memory that is there already."""
    piece_nbytes, files = 4 * 2**20, sorted(folder.glob("*.safetensors"))
    drop(files)
    buffers = [mmap.mmap(-1, piece_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE) for _ in range(4)]
    places = [(file, at) for file in files for at in range(0, file.stat().st_size, piece_nbytes)]
    descriptors = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(share: int) -> None:
        for file, at in places[share::4]:
            os.preadv(descriptors[file], [buffers[share]], at)

    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    taken_s = time.perf_counter() - started
    for descriptor in descriptors.values():
        os.close(descriptor)
    return taken_s


def take_turns(
    contenders: Mapping[str, Contender],
    settings: Sequence[str],
    requests: Mapping[str, Mapping[str, int]],
    rounds: int,
    warmup: int = 1,
) -> dict[str, Run]:
    """For each setting `kind/...` ask its contender what `requests` says, `rounds` times after a warm-up."""
    runs = {setting: Run() for setting in settings}
    for turn in range(-warmup, rounds):
        for setting in settings:
            figures, peak = contenders[setting.partition("/")[0]].ask(**requests[setting], seed=max(turn, 0))
            sys.stderr.write(
                f"{setting}: {figures['first_s']:.2f} s, then {figures['pass_s']:.3f} s a pass\n"
            )
            if figures["left"] > MOST_LEFT:
                sys.exit(
                    f"bench_generate: {figures['left']:.0%} of the files could not be dropped from memory"
                )
            if turn >= 0:
                runs[setting].rounds.append(figures)
                runs[setting].peak = runs[setting].peak.or_larger(peak.anonymous, peak.total)
    return runs


def let_rest(contenders: Mapping[str, Contender]) -> None:
    """Have all contenders give back the pages that they have mapped."""
    for contender in contenders.values():
        contender.ask(tokens=0)


def ratios(one: Run, other: Run, name: str) -> list[float]:
    """Between neighbours in time."""
    return [a[name] / b[name] for a, b in zip(one.rounds, other.rounds, strict=True)]


def compare(
    contenders: Mapping[str, Contender], rows: int, folder: Path, asked: argparse.Namespace
) -> tuple[list[dict[str, str]], dict[str, object]]:
    """The lines of the first table for one batch size, and all figures behind them."""
    shape = {"rows": rows, "length": asked.prompt, "guess": -1}
    few = {
        kind: asked.slow_tokens if kind in ("accelerate", "airllm") else asked.tokens for kind in contenders
    }
    hot = take_turns(
        contenders,
        list(contenders),
        {k: {**shape, "tokens": few[k], "cold": 0} for k in contenders},
        asked.rounds,
    )
    check_equal(hot)
    from_disk = [kind for kind in contenders if kind != "resident"]
    cold: dict[str, Run] = {}
    reading_s: list[float] = []
    if asked.cold_rounds:
        let_rest(contenders)
        requests = {k: {**shape, "tokens": asked.slow_tokens, "cold": 1} for k in from_disk}
        for _ in range(asked.cold_rounds):
            reading_s.append(time_of_reading(folder))
            for kind, run in take_turns(contenders, from_disk, requests, 1, warmup=0).items():
                cold.setdefault(kind, Run()).rounds += run.rounds
    lines = []
    for kind, run in hot.items():
        dropped = cold.get(kind)
        against = hot.get("resident")
        lines.append(
            {
                "batch": str(rows),
                "": kind,
                "first s": f"{run.median('first_s'):.2f}",
                "s/token": f"{run.median('pass_s'):.3f}",
                "CPU s/token": f"{run.median('cpu_s'):.3f}",
                "ratio": f"{median(ratios(run, against, 'pass_s')):.2f}" if against else "",
                "CPU ratio": f"{median(ratios(run, against, 'cpu_s')):.2f}" if against else "",
                "anonymous MB": mb(run.peak.anonymous),
                "total MB": mb(run.peak.total),
                "cold s/token": f"{dropped.median('pass_s'):.2f}" if dropped else "",
                "cold/reading": f"{dropped.median('pass_s') / median(reading_s):.2f}" if dropped else "",
            }
        )
    figures: dict[str, object] = {"hot": _plain(hot), "cold": _plain(cold), "reading_s": reading_s}
    return lines, figures


def speculate(
    contender: Contender, asked: argparse.Namespace
) -> tuple[list[dict[str, str]], dict[str, object]]:
    """The lines of the second table: airtune alone, one row, with and without guesses."""
    guesses = {"one token a pass": 0, "lookup": 1} | ({"assistant": 2} if asked.assistant else {})
    settings = {
        f"airtune/{name}/{cold}": {
            "rows": 1, "length": asked.prompt, "tokens": asked.tokens, "cold": cold, "guess": guess
        }
        for name, guess in guesses.items()
        for cold in ((0, 1) if asked.cold_rounds else (0,))
    }  # fmt: skip
    runs = take_turns({"airtune": contender}, list(settings), settings, max(1, asked.rounds // 2))
    lines = []
    for name in guesses:
        hot, cold = runs[f"airtune/{name}/0"], runs.get(f"airtune/{name}/1")
        new = hot.median("new")
        lines.append(
            {
                "": name,
                "tokens/pass": f"{new / hot.median('passes'):.2f}",
                "read MB/token": mb((cold or hot).median("bytes_read") / new),
                "s/token": f"{hot.median('all_s') / new:.3f}",
                "cold s/token": f"{cold.median('all_s') / new:.3f}" if cold else "",
            }
        )
    return lines, _plain(runs)


def check_equal(runs: Mapping[str, Run]) -> None:
    """airtune's tokens are the resident model's."""
    if not {"airtune", "resident"} <= runs.keys():
        return
    for one, other in zip(runs["airtune"].rounds, runs["resident"].rounds, strict=True):
        if one["checksum"] != other["checksum"]:
            sys.exit("bench_generate: airtune and the resident model generate different tokens")


def _plain(runs: Mapping[str, Run]) -> dict[str, object]:
    return {name: asdict(run) for name, run in runs.items()}


def start(kind: str, folder: Path, asked: argparse.Namespace, ending: ExitStack) -> Contender:
    python = asked.airllm_python if kind == "airllm" else sys.executable
    command = [str(python), "-W", "ignore", __file__, "--checkpoint", str(folder), "--contender", kind]
    if kind in ("accelerate", "airllm"):
        beside = asked.copies or folder.parent
        copy = ending.enter_context(tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=beside))
        command += ["--copy", copy]
    for option in ("host_memory", "assistant"):
        if value := getattr(asked, option):
            command += [f"--{option.replace('_', '-')}", str(value)]
    contender = Contender(command, asked.threads)
    ending.callback(contender.close)
    return contender


def measure(folder: Path, asked: argparse.Namespace) -> None:
    shown: list[dict[str, str]] = []
    kept: dict[str, object] = {"options": {k: str(v) for k, v in vars(asked).items()}}
    with ExitStack() as ending:
        contenders = {kind: start(kind, folder, asked, ending) for kind in asked.kinds}
        for rows in asked.batch:
            lines, kept[f"batch {rows}"] = compare(contenders, rows, folder, asked)
            shown += lines
        sys.stdout.write(table(shown))
        if "airtune" in contenders and contenders["airtune"].ready["takes guesses"]:
            let_rest(contenders)
            lines, kept["guesses"] = speculate(contenders["airtune"], asked)
            sys.stdout.write("\n" + table(lines))
    write_json(asked.json, kept)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generation: airtune against other ways to do it.")
    parser.add_argument("--checkpoint", type=Path, help="(default: a random one)")
    parser.add_argument("--kind", default="llama", help="of the random model (default: %(default)s)")
    parser.add_argument("--params", default="0.6B", help="of the random model (default: %(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["airtune", "resident"], help="who contends"
    )
    parser.add_argument("--airllm-python", type=Path, help="of an environment in which AirLLM is installed")
    parser.add_argument("--copies", type=Path, help="where copies of the checkpoint go (default: beside it)")
    parser.add_argument("--host-memory", help="for airtune (default: not limited)")
    parser.add_argument("--assistant", type=Path, help="folder of a small model that guesses")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="new ones of a row (default: %(default)s)")
    parser.add_argument(
        "--slow-tokens", type=int, default=3, help="where each takes long: the other two, and cold"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed (default: %(default)s)")
    parser.add_argument(
        "--cold-rounds", type=int, default=3, help="timed; 0 leaves it out (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--contender", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--copy", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.contender:
        contend(asked.contender, asked.checkpoint, asked.copy, asked.host_memory, asked.assistant)
        return
    if "airllm" in asked.kinds and not asked.airllm_python:
        parser.error("airllm is asked for: give --airllm-python, the python of an environment that has it")
    with checkpoint(asked.checkpoint, "--kind", asked.kind, "--params", asked.params) as folder:
        measure(folder, asked)


if __name__ == "__main__":
    main()

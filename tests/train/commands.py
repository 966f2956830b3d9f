"""`memjax` in processes of their own, on a tiny experiment, for tests of several.

What: `write_experiment`, `start`, `start_pair` and `finish`.
Why: who starts, is told and ends when is what these tests are about; only real
    processes show it.
When not: one process; `tests.train.toy` is quicker.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

EXPERIMENT = """
from memjax.data.config import CorpusConfig, DataConfig
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.train.config import TrainConfig

MEMORY = EngramConfig(layers=(0,), orders=(2, 3), n_heads=1, rows_per_head=50,
                      row_width=4, kernel_size=0)

def config():
    return Experiment(
        name="tiny",
        model=ModelConfig(n_layers=1, d_model=16, n_heads=2, n_kv_heads=2, d_ff=16,
                          scan_layers=False, memories=(MEMORY,)),
        data=DataConfig(corpora=(CorpusConfig(name="STORE"),), context=16,
                        batch_size=8, eval_stride=16, eval_batch_size=8, n_threads=0),
        train=TrainConfig(n_steps=8, eval_every=4, save_every=2, log_every=1,
                          max_eval_batches=2, keep_last=10),
    )
"""

# Prepended to the command: a process that fails, or waits, in the middle of training.
PATCH = """
import os, time
from memjax.data.pipeline import Batches
read, failing = Batches.__next__, {failing!r}
def patched(batches):
    time.sleep({pause_s})
    if batches.step == failing:
        {action}
    return read(batches)
Batches.__next__ = patched
"""
MAIN = "import sys; from memjax.cli.main import main; sys.exit(main())"


def write_experiment(folder):
    """A file over a store of own text; `prepare` runs in this process."""
    from memjax.cli.main import main

    notes = folder / "notes.txt"
    notes.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    assert main(["prepare", str(notes), "--out", str(folder / "store")]) == 0
    file = folder / "tiny.py"
    file.write_text(EXPERIMENT.replace("STORE", str(folder / "store")))
    return file


def patch(*, pause_s=0.0, failing=None, action="raise OSError('no such disk')"):
    """Text for `start`: read each batch later, and not at all at step `failing`."""
    return PATCH.format(pause_s=pause_s, failing=failing, action=action)


def start(*words, n_devices=1, before="", **environ):
    """`memjax WORDS` with so many CPU devices; stdout and stderr are pipes."""
    flags = os.environ.get("XLA_FLAGS", "")
    return subprocess.Popen(
        [sys.executable, "-c", before + MAIN, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={n_devices}",
            **environ,
        },
    )


def start_pair(*words, n_devices=2, before=("", ""), **environ):
    """The same command twice, as processes 0 and 1 of two."""
    address = f"127.0.0.1:{free_port()}"
    return [
        start(
            *words,
            *("--coordinator", address, "--num-processes", 2, "--process-id", i),
            n_devices=n_devices,
            before=before[i],
            **environ,
        )
        for i in range(2)
    ]


def finish(processes, timeout_s=120):
    """[(exit code, stdout, stderr)] without gloo's lines, in order."""
    ended = []
    for process in processes:
        texts = process.communicate(timeout=timeout_s)
        out, err = ("\n".join(_without_gloo(text)) for text in texts)
        ended.append((process.returncode, out, err))
    return ended


def _without_gloo(text):
    return [line for line in text.splitlines() if not line.startswith("[Gloo]")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

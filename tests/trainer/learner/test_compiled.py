"""``trainer.compile``: compiled layers compute what layers compute as they are, and few programs serve all rows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_job import copy_job
from tiny_mixture import mixture

from rljob_api.resolution import resolve
from rljob_api.spec.job import RLJob
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from rljob_trainer.learner.work import cut

LOSS = LossSettings(kl_kind="k3", kl_coefficient=0.1, entropy_coefficient=0.01, value_clip=0.3, temperature=0.8)
WANTED = ScoreRequest(0.7, log_probs=True, entropy=True, reference=True, values=True)


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    mixture(50).save_pretrained(folder)
    return folder


def programs() -> int:
    """That this process's compiler has made so far."""
    # Not by a name of this module: ranks get copies of what those stand for.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def traced_only() -> Iterator[None]:
    """Inside, what is sent through ``torch.compile`` becomes programs that nothing turns into C++."""
    compiling: Any = torch.compile

    def compiled(code: Any, *, options: dict[str, Any] | None = None, **others: Any) -> Any:
        return compiling(code, backend="aot_eager", **others)  # the options are Inductor's

    head = importlib.import_module("rljob_trainer.learner.compiled_head")  # not a copy of what it keeps
    head._program.cache_clear()
    try:
        with mock.patch.object(torch, "compile", compiled):
            yield
    finally:
        head._program.cache_clear()


def computed(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], int]:
    """Whole gradients of actor and critic, the streams of a score, and how many programs were made for them."""
    torch.compiler.reset()
    before, backend = programs(), Fsdp2()
    gradients = {}
    with traced_only():
        learner = backend.start(settings, rank, address, timeout_seconds=60)
        work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
        share = work.sent()[rank]
        # Without gradients there are other programs.
        scores = learner.score(share, WANTED).streams if settings.reference else {}
        for trained in learner._trained:
            learner.gradient([trained], share, 0, LOSS)
            for name, parameter in trained.parameters():
                assert parameter.grad is not None, name
                gradients[f"{trained.name}.{name}"] = full(parameter.grad).clone()
    return gradients, scores, programs() - before


def far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters together."""
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in theirs]).norm()
    return float(difference / torch.cat([value.double().flatten() for value in theirs.values()]).norm())


# C++ takes its compiler seconds a program: these run what the tracer has made, the test in half precision goes the
# whole way.
@pytest.mark.slow(stands_for="[gemma]")
@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("tied_folder", {"critic": OptimizerSettings(), "reference": True}),
        ("tied_folder", {"ranks": 2}),
        ("untied_folder", {"ranks": 2, "context": 2}),
        ("gemma_folder", {"activation_checkpointing": True}),
        ("tied_folder", {"lora": LoraSettings(4, 8)}),
        ("mixture_folder", {}),
    ],
    ids=["three models", "two ranks", "rows of two ranks", "gemma", "adapter", "mixture"],
)
def test_compiled_layers_have_the_scores_and_the_gradient_of_layers_as_they_are(
    folder: str,
    changes: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    request: pytest.FixtureRequest,
) -> None:
    path, batch = request.getfixturevalue(folder), make_batch(groups=4)
    settings = replace(LearnerSettings(path, micro_batch_tokens=60), **changes)
    expected = ranks.run(settings.ranks, computed, settings, batch)
    found = ranks.run(settings.ranks, computed, replace(settings, compile=True), batch)
    for (gradients, scores, made), (ours, our_scores, programs_made) in zip(expected, found, strict=True):
        assert made == 0
        assert programs_made > 0
        assert far(ours, gradients) < 1e-5
        assert our_scores.keys() == scores.keys()
        for name, stream in scores.items():
            np.testing.assert_allclose(our_scores[name], stream, atol=1e-5, err_msg=name)
        # The reference is the actor before an update, bit for bit: by the same programs.
        if settings.reference:
            np.testing.assert_array_equal(our_scores["log_probs"], our_scores["ref_log_probs"])


def scored_and_begun(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[np.ndarray, np.ndarray]:
    """The actor's log-probs as a score and as an update's forward pass computes them."""
    torch.compiler.reset()
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=60)
    share = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings)).sent()[rank]
    scores = learner.score(share, ScoreRequest(LOSS.temperature, log_probs=True)).streams["log_probs"]
    # An update would have its backward programs compiled too, for a minute, which no log-prob depends on.
    rows = learner._rows(share, learner._place, final=False)
    with learner._residence.working("actor"):
        parts = [learner.actor.module(row, LOSS.temperature).log_probs for row in rows]
    assert all(part.requires_grad for part in parts)
    return scores, torch.cat(parts).detach().numpy()


@pytest.mark.slow(stands_for="test_compiled_layers_have_the_scores_and_the_gradient_of_layers_as_they_are[gemma]")
def test_in_half_precision_an_update_begins_with_the_log_probs_of_a_score(
    ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    """By other programs, without gradients and with: those cut a layer into other kernels."""
    settings = LearnerSettings(tied_folder, dtype="bfloat16", micro_batch_tokens=60, compile=True)
    # The compiler takes ten seconds of a processor for each of several programs.
    [(scores, begun)] = ranks.run(1, scored_and_begun, settings, make_batch(groups=4), seconds=560)
    assert len(scores) > 20
    assert scores.std() > 0
    np.testing.assert_array_equal(begun, scores)


def made_for_each(rank: int, address: str, settings: LearnerSettings, batches: list[SequenceBatch]) -> list[int]:
    """How many programs each batch's gradient has needed, one after the other."""
    torch.compiler.reset()
    backend = Fsdp2()
    made = []
    with traced_only():
        learner = backend.start(settings, rank, address, timeout_seconds=60)
        for batch in batches:
            before = programs()
            work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
            learner.gradient([learner.actor], work.sent()[rank], 0, LOSS)
            made.append(programs() - before)
    return made


def test_rows_of_other_lengths_need_no_other_programs(
    ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path
) -> None:
    settings = LearnerSettings(untied_folder, micro_batch_tokens=60, compile=True)
    batches = [make_batch(groups=1 + number % 5, seed=number, longest=5 + number) for number in range(24)]
    lengths = {int((batch.prompt_lengths + batch.response_lengths).sum()) for batch in batches}
    assert len(lengths) > 20
    [made] = ranks.run(1, made_for_each, settings, batches)
    # A layer's pieces and the last one's end, in both directions. Attention's output lies in memory the same way for
    # rows that it computes in one block and for others.
    assert 0 < made[0] < 10
    assert sum(made[1:]) == 0


def sampled(rank: int, address: str, settings: LearnerSettings) -> tuple[list[float], int]:
    """The live model's logits outside of packed rows, as an engine in the rank's process asks for them, and how many
    programs were made."""
    before = programs()
    learner: LearnerRank = Fsdp2().start(settings, rank, address, timeout_seconds=60)
    assert learner.live_model is not None
    with torch.no_grad():
        logits = learner.live_model(torch.tensor([[3, 4, 5]]), use_cache=False).logits
    return logits.flatten().tolist(), programs() - before


def test_an_engine_on_the_live_model_runs_the_layers_as_they_are(ranks: Any, tied_folder: Path) -> None:
    settings = LearnerSettings(tied_folder)
    [expected] = ranks.run(1, sampled, settings)
    assert ranks.run(1, sampled, replace(settings, compile=True)) == [expected]
    assert expected[1] == 0


def test_the_job_says_it(tmp_path: Path) -> None:
    for said in (True, False):
        job = resolve(RLJob.model_validate(copy_job(trainer={"compile": said})))
        assert LearnerSettings.from_job(job, tmp_path).compile is said


@pytest.mark.slow(stands_for="test_rows_of_other_lengths_need_no_other_programs")
def test_programs_are_kept_among_the_temporary_files_and_nowhere_else(tmp_path: Path) -> None:
    """A pod need not be able to write anywhere else."""
    home, temporary, here = (tmp_path / name for name in ("home", "temporary", "here"))
    for folder in (home, temporary, here):
        folder.mkdir()
    program = """
import torch
from rljob_trainer.learner.compiled import compile_layers

class Layer(torch.nn.Linear):
    def forward(self, x, packed):
        return torch.nn.functional.silu(x @ self.weight) * 2

layer = Layer(4, 4, bias=False)
x = torch.randn(3, 4)
with torch.no_grad():
    expected = layer(x, packed=True)
    compile_layers([layer])
    torch.testing.assert_close(layer(x, packed=True), expected)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON", "XDG"))}
    environment = kept | {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    # Neither of which says where it is kept, and both take longer than all else.
    environment |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", program], cwd=here, env=environment, check=True, timeout=300)
    assert [path for folder in (home, here) for path in folder.rglob("*")] == []
    assert list(temporary.rglob("*.so"))

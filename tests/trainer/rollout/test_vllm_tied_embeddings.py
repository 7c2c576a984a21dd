"""A model whose output layer shares the embedding's matrix, in vLLM. A file of its own: vLLM's parallel groups are the
process's, so no second engine may be open beside the one that ``test_vllm_engine.py`` keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from rljob_trainer.weights.manifest import Manifest

pytestmark = pytest.mark.vllm


@pytest.mark.slow(
    stands_for="tests/runs/test_vllm.py::test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer"
)
def test_an_output_layer_that_shares_the_embedding_is_loaded_with_it(
    make_model: Callable[..., PreTrainedModel], log_probs_of: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    """vLLM's CPU kernels pack weights, and the shared matrix is sent once."""
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    make_model("qwen3", seed=1).save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, max_concurrent=8, max_context=64, engine_args={"kv_cache_memory_bytes": 32 << 20})
    try:
        for version in (1, 2):
            new = make_model("qwen3", seed=1 + version)
            assert new.lm_head.weight is new.model.embed_tokens.weight
            engine.begin_update()
            engine.load(new.named_parameters())
            engine.finish_update(version, Manifest([]))
            pair = ((5, 6, 7), (8, 9, 10))
            np.testing.assert_allclose(engine.score([pair], 1.0)[0], log_probs_of(new, *pair), atol=1e-4)
    finally:
        engine.close()

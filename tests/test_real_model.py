"""A real pretrained model, where one is at hand.

SUPERPOSE_REAL_MODEL=FOLDER [SUPERPOSE_REAL_LAMBADA=lambada_openai.jsonl] pytest -m real_model
"""

import os

import pytest
import torch

from superpose.config import LambadaSettings
from superpose.data.lambada import read_lambada
from superpose.models.layout import mixed_hidden, output_head
from superpose.models.loading import LanguageModel, load
from superpose.streams.batch import StreamBatch
from superpose.suites.lambada import lambada

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    folder = os.environ.get("SUPERPOSE_REAL_MODEL")
    if not folder:
        pytest.skip("SUPERPOSE_REAL_MODEL names no folder of a pretrained model")
    return load(folder)


def test_equal_streams_are_one_stream(model):
    text = "The capital of France is Paris, and the capital of Italy is"
    ids = torch.tensor(model.tokenizer(text)["input_ids"])
    with torch.no_grad():
        expected = model.model(input_ids=ids[None]).logits
        for num_streams in (1, 2, 3):
            batch = StreamBatch.uniform(ids.expand(1, num_streams, -1))
            logits = output_head(model.model).logits(mixed_hidden(model.model, batch))
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)


def test_lambada_is_that_of_lm_eval(model):
    """SmolLM2-135M-Instruct, first 300 rows: lm-eval 0.4.13 gives 0.3267 and 43.71."""
    path = os.environ.get("SUPERPOSE_REAL_LAMBADA")
    if not path or model.num_parameters != 134_515_008:
        pytest.skip("SUPERPOSE_REAL_LAMBADA names no file, or the model is not SmolLM2-135M")
    result = lambada(model, read_lambada(path)[:300], LambadaSettings(), num_streams=2)
    assert result.accuracy == pytest.approx(98 / 300, abs=1e-9)
    assert result.perplexity == pytest.approx(43.71, abs=0.005)

"""What a model's directory says of how its hidden states become a vector."""

import json

import pytest

from mlx_serve.engine.generate.pooling import LAST_TOKEN, Pooling, read_pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def directory(path, files):
    for name, value in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(("files", "mode"), [
    ({}, "last"),
    ({"config.json": {"use_bidirectional_attention": False, "is_causal": True}}, "last"),
    ({"config.json": {"text_config": {"use_bidirectional_attention": "vision"}}}, "last"),
    ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}}, "mean"),
    ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}}, "last"),
    ({"1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode": "mean"}}, "mean"),
    ({"1_Pooling/config.json": {"word_embedding_dimension": 8}}, "last"),
    ({"modules.json": [TRANSFORMER, POOLING, NORMALIZE], "1_Pooling/config.json": {"pooling_mode": "mean"}}, "mean"),
    ({"modules.json": [TRANSFORMER, POOLING | {"path": "pool"}], "pool/config.json": {"pooling_mode": "mean"}}, "mean"),
])  # fmt: skip
def test_the_mode_is_read_and_else_the_last_token(tmp_path, files, mode):
    assert read_pooling(directory(tmp_path, files)) == Pooling(mode)


@pytest.mark.parametrize(("files", "word"), [
    ({"config.json": {"use_bidirectional_attention": True}}, "look at the ones behind"),
    ({"config.json": {"text_config": {"use_bidirectional_attention": True}}}, "look at the ones behind"),
    ({"config.json": {"is_causal": False}}, "look at the ones behind"),
    ({"modules.json": [TRANSFORMER, POOLING, DENSE]}, "'Dense'"),
    ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "way of pooling"),
    ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}}, "way of pooling"),
    ({"1_Pooling/config.json": "{"}, "can be read"),
    ({"1_Pooling/config.json": []}, "can be read"),
    ({"1_Pooling/config.json": {"pooling_mode": ["mean"]}}, "can be read"),
    ({"modules.json": [5]}, "can be read"),
    ({"modules.json": [{"idx": 0}]}, "can be read"),
])  # fmt: skip
def test_what_would_give_wrong_vectors_is_a_fault(tmp_path, files, word):
    assert word in read_pooling(directory(tmp_path, files)).fault
    assert not LAST_TOKEN.fault

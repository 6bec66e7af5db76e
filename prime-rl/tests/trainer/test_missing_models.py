"""A model or a tokenizer that is not there is told under the key that the user wrote."""

from __future__ import annotations

import pytest

from prime_rl.configs.model import ModelConfig, TokenizerConfig
from prime_rl.trainer.model.build import setup_tokenizer
from prime_rl.trainer.process.errors import ModelError


@pytest.mark.parametrize(("tokenizer", "key"), [(None, "model.name"), ("/gone/tokenizer", "tokenizer.name")])
def test_a_missing_tokenizer_is_told_under_the_key_that_names_it(tokenizer: str | None, key: str) -> None:
    name = tokenizer or "/gone/model"
    with pytest.raises(ModelError, match=f"^{key} = {name}: no such directory$"):
        setup_tokenizer(TokenizerConfig(name=tokenizer), ModelConfig(name="/gone/model"))

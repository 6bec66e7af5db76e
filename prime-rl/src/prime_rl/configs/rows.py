"""How SFT reads the rows of its datasets, and which messages it trains on."""

from typing import Literal

from pydantic import Field

from prime_rl.utils.pydantic_config import BaseConfig


class LossMaskConfig(BaseConfig):
    """Roles whose messages are trained on."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages."""

    tool: bool = False
    """Tool messages."""


class ColumnsConfig(BaseConfig):
    """Names that the data uses for what SFT reads. With any of the columns set, the others are not read, except `tools`
    and `chat_template_kwargs`."""

    messages: str | None = None
    """Column of the messages."""

    prompt: str | None = None
    """Column of the prompt."""

    response: str | None = None
    """Column of the assistant's answer to `prompt`."""

    completion: str | None = None
    """Column of the text that continues `prompt`."""

    instruction: str | None = None
    """Column of the instruction."""

    input: str | None = None
    """Column of the instruction's input."""

    output: str | None = None
    """Column of the answer to `instruction`."""

    system: str | None = None
    """Column of the system message."""

    tools: str | None = None
    """Column of the tools."""

    text: str | None = None
    """Column of plain text."""

    role: str | None = None
    """Key of a message's role."""

    content: str | None = None
    """Key of a message's content."""

    @property
    def of_rows(self) -> dict[str, str]:
        """The columns that are set, by our name."""
        return {ours: theirs for ours, theirs in self if theirs is not None and ours not in ("role", "content")}


class RowFormatConfig(BaseConfig):
    """How rows are read."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of columns that differ from those that SFT knows."""

    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field({})
    """Roles of the data that differ from those that SFT knows, such as `patient = "user"`."""


class SourceConfig(RowFormatConfig):
    """One of several datasets. Without `columns` and `roles` it takes those of `data`."""

    name: str
    """Dataset: a hub id, a directory or a file."""

    subset: str | None = None
    """Subset. None takes the default one."""

    split: str = "train"
    """Split."""

    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the weights of the other datasets."""

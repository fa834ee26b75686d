from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    data_dir: Path
    address: str = "127.0.0.1:0"
    metrics_address: str | None = None
    num_threads: int = 1
    timeout_s: float = 2.5
    is_open: bool = False
    is_wanted: bool | None = None

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {self.num_threads}")


def load(tmp_path: Path, text: str = "", section: str | None = None, **variables: str) -> Settings:
    path = tmp_path / "pod.toml"
    path.write_text(text)
    return load_config(Settings, path=path, environment=variables, section=section)


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        'data_dir = "~/x"\nnum_threads = 3\ntimeout_s = 1\nis_open = true\naddress = "a:1"',
    )
    assert settings == Settings(
        data_dir=Path("~/x").expanduser(),
        address="a:1",
        num_threads=3,
        timeout_s=1.0,
        is_open=True,
    )
    assert isinstance(settings.timeout_s, float)


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        'data_dir = "/a"\nnum_threads = 3\nis_open = true',
        TINSMITH_DATA_DIR="/b",
        TINSMITH_NUM_THREADS="4",
        TINSMITH_TIMEOUT_S="1e-3",
        TINSMITH_IS_OPEN="off",
        TINSMITH_METRICS_ADDRESS="m:1",
        TINSMITH_OF_ANOTHER_POD="x",
        NUM_THREADS="9",
    )
    assert settings == Settings(
        data_dir=Path("/b"), num_threads=4, timeout_s=1e-3, is_open=False, metrics_address="m:1"
    )


def test_an_empty_variable_clears_an_optional_field(tmp_path: Path) -> None:
    text = 'data_dir = "/a"\nmetrics_address = "m:1"'
    assert load(tmp_path, text, TINSMITH_METRICS_ADDRESS="").metrics_address is None


@pytest.mark.parametrize(
    ("text", "is_wanted"),
    [
        pytest.param("", None, id="left-out"),
        pytest.param('is_wanted = "auto"', None, id="auto"),
        pytest.param("is_wanted = true", True, id="true"),
        pytest.param('is_wanted = "false"', False, id="false-in-words"),
    ],
)
def test_what_may_be_left_to_the_pod_is_auto(
    tmp_path: Path, text: str, is_wanted: bool | None
) -> None:
    assert load(tmp_path, f'data_dir = "x"\n{text}').is_wanted is is_wanted


def test_a_section_is_read_alone(tmp_path: Path) -> None:
    text = 'unknown = 1\n[trainer]\ndata_dir = "/a"\n[sampler]\ndata_dir = "/b"'
    assert load(tmp_path, text, section="trainer").data_dir == Path("/a")
    with pytest.raises(ConfigError, match="not a table"):
        load(tmp_path, 'trainer = 1\ndata_dir = "/a"', section="trainer")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            'data_dir = "/a"\nnum_thread = 3',
            r"num_thread; did you mean num_threads\?",
            id="misspelt",
        ),
        pytest.param('data_dir = "/a"\nnum_threads = "many"', "num_threads", id="word-for-int"),
        pytest.param('data_dir = "/a"\nnum_threads = 1.5', "num_threads", id="fraction-for-int"),
        pytest.param('data_dir = "/a"\nnum_threads = true', "num_threads", id="bool-for-int"),
        pytest.param('data_dir = "/a"\nis_open = "perhaps"', "is_open", id="word-for-bool"),
        pytest.param('data_dir = "/a"\ntimeout_s = []', "timeout_s|float", id="list"),
        pytest.param('data_dir = "/a"\nnum_threads = 0', "at least 1", id="range"),
        pytest.param("", r"data_dir \(TINSMITH_DATA_DIR\)", id="required"),
        pytest.param("data_dir = ", "not TOML", id="not-toml"),
    ],
)
def test_wrong_settings_are_found_when_the_pod_starts(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_config(Settings, path=tmp_path / "none.toml", environment={})

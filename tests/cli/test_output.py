"""The conventions of every command: one JSON document, one error line, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from disagmoe_compile.cli import main
from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.errors import DisagMoEError, InputError

CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line with one command, `try HOW`, that ends in every way a command can."""

    @command
    def try_(how: str, as_json: JsonOption = False, debug: DebugOption = False) -> Output:
        if how == "input":
            raise InputError("a size\nthat cannot be")
        if how == "peer":
            raise DisagMoEError("rank 1 died")
        if how == "bug":
            raise KeyError("missing")
        if how == "noisy":
            sys.stdout.write("a library talks\n")
        value = float("nan") if how == "nan" else 1
        failure = DisagMoEError("losses differ") if how == "differs" else None
        text = "x" * 150 if how == "wide" else "for people"
        return Output({"value": value}, lambda console: console.print(text), failure)

    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("try")(try_)
    monkeypatch.setattr(main, "app", app)


@pytest.mark.usefixtures("example")
class TestCommand:
    def test_people_get_text(self, disagmoe: CommandLine) -> None:
        assert disagmoe("try", "fine") == (0, "for people\n", "")

    def test_a_pipe_has_no_width_but_the_one_it_is_given(
        self, disagmoe: CommandLine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        assert disagmoe("try", "wide")[1] == "x" * 150 + "\n"
        monkeypatch.setenv("COLUMNS", "80")
        assert disagmoe("try", "wide")[1] == "x" * 80 + "\n" + "x" * 70 + "\n"

    def test_json_is_one_document_with_a_schema_version(self, disagmoe: CommandLine) -> None:
        status, out, err = disagmoe("try", "fine", "--json")
        assert (status, json.loads(out), err) == (0, {"schema_version": 1, "value": 1}, "")

    def test_what_libraries_print_goes_to_stderr_with_json(self, disagmoe: CommandLine) -> None:
        _, out, err = disagmoe("try", "noisy", "--json")
        assert json.loads(out)["value"] == 1
        assert err == "a library talks\n"

    def test_bad_input_is_one_line_and_status_2(self, disagmoe: CommandLine) -> None:
        assert disagmoe("try", "input") == (2, "", "disagmoe: error: a size that cannot be\n")

    def test_a_failure_while_running_is_status_1(self, disagmoe: CommandLine) -> None:
        assert disagmoe("try", "peer", "--json") == (1, "", "disagmoe: error: rank 1 died\n")

    def test_a_bug_is_one_line_that_names_debug(self, disagmoe: CommandLine) -> None:
        status, out, err = disagmoe("try", "bug")
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("disagmoe: error: internal error, KeyError: 'missing'") and "--debug" in err

    def test_debug_adds_the_traceback_and_keeps_line_and_status(self, disagmoe: CommandLine) -> None:
        status, _, err = disagmoe("try", "input", "--debug")
        assert status == 2
        assert err.startswith("Traceback") and err.endswith("disagmoe: error: a size that cannot be\n")

    def test_a_failed_check_still_shows_its_output(self, disagmoe: CommandLine) -> None:
        status, out, err = disagmoe("try", "differs", "--json")
        assert (status, json.loads(out)["value"], err) == (1, 1, "disagmoe: error: losses differ\n")

    def test_a_document_that_is_not_json_is_an_error(self, disagmoe: CommandLine) -> None:
        status, out, _ = disagmoe("try", "nan", "--json")
        assert (status, out) == (1, "")


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["clusters", "--bogus"], ["plan"], ["plan", "--problem"], ["clusters", "extra"]],
)
def test_a_usage_error_is_one_line_and_status_2(arguments: list[str], disagmoe: CommandLine) -> None:
    status, out, err = disagmoe(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("disagmoe: error: ")


def test_without_a_command_it_prints_its_help(disagmoe: CommandLine) -> None:
    status, out, err = disagmoe()
    assert (status, err) == (0, "")
    for name in ("doctor", "clusters", "plan"):
        assert name in out


def test_version(disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe("--version")
    assert status == 0 and out.startswith("disagmoe ")


def test_every_command_takes_json_and_debug() -> None:
    for registered in main.app.registered_commands:
        options = typer.main.get_command_from_info(
            registered, pretty_exceptions_short=False, rich_markup_mode=None
        ).params
        flags = {flag for option in options for flag in option.opts}
        assert {"--json", "--debug"} <= flags, registered.name


def test_a_closed_pipe_is_not_a_traceback(tmp_path: Path) -> None:
    code = "from disagmoe_compile.cli.main import run; run(['clusters', '--json'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # the reader is gone before the command writes
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert errors == ""


def test_planning_commands_do_not_import_torch(tmp_path: Path) -> None:
    problem = tmp_path / "problem.json"
    names = ("attention_flops", "ffn_flops", "exchange_bytes", "gpu_flops", "nic_bytes_per_s")
    problem.write_text(json.dumps({**dict.fromkeys(names, 1), "gpus": 4, "nics": 4}))
    code = (
        "import sys\nfrom disagmoe_compile.cli.main import run\n"
        f"try: run(['plan', '--json', '--problem', {str(problem)!r}])\n"
        "except SystemExit as ended: sys.exit('torch' in sys.modules or ended.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention_gpus"] == 2

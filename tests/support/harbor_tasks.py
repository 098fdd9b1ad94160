"""Task folders in the formats of Harbor and Terminal-bench, like the first examples of their documentation."""

from pathlib import Path

TEST_SCRIPT = """\
#!/bin/bash
if grep -qx "Hello, world!" hello.txt; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
exit 3
"""


def write_folder(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files by path as a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def hello_world(folder: Path, config: str = "", /, **files: str | bytes) -> Path:
    """Write the task "Write 'Hello, world!' into hello.txt". `config` is appended to its task.toml."""
    return write_folder(
        folder,
        {
            "task.toml": (
                'schema_version = "1.4"\n\n[task]\nname = "harbor/hello-world"\n\n[metadata]\ndifficulty = "easy"\n'
                'tags = ["trivial"]\n\n[environment]\nnetwork_mode = "no-network"\ncpus = 1\nmemory_mb = 512\n'
                f"{config}"
            ),
            "instruction.md": "<!-- harbor-canary GUID 0 -->\n\nWrite `Hello, world!` into hello.txt.\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "tests/test.sh": TEST_SCRIPT,
            "solution/solve.sh": '#!/bin/bash\necho "Hello, world!" > hello.txt\n',
            **files,
        },
    )


def in_two_steps(folder: Path, gate: float = 0.5, strategy: str = "mean") -> Path:
    """Write a task with two steps: one file, then another one made from it. The second step's test requires both."""
    return write_folder(
        folder,
        {
            "task.toml": (
                f'schema_version = "1.4"\nmulti_step_reward_strategy = "{strategy}"\n\n[environment]\n'
                'network_mode = "no-network"\nworkdir = "/app"\n\n'
                f'[[steps]]\nname = "write"\nmin_reward = {gate}\n\n[[steps]]\nname = "double"\n'
            ),
            "steps/write/instruction.md": "Write one line into a.txt.\n",
            "steps/write/tests/test.sh": "test -s a.txt && echo 1 > /logs/verifier/reward.txt\n"
            "[ -s a.txt ] || echo 0.25 > /logs/verifier/reward.txt\n",
            "steps/write/solution/solve.sh": "echo line > a.txt\n",
            "steps/double/instruction.md": "Write a.txt twice into b.txt.\n",
            "steps/double/workdir/given.txt": "for the second step\n",
            "steps/double/workdir/setup.sh": "#!/bin/bash\ntest ! -e /tests && cp given.txt prepared.txt\n",
            "steps/double/tests/test.sh": "#!/bin/bash\nif cat a.txt a.txt | cmp - b.txt && [ -s prepared.txt ]\n"
            'then echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json\n'
            "else echo 0 > /logs/verifier/reward.txt; fi\n",
            "steps/double/solution/solve.sh": "test -s prepared.txt && cat a.txt a.txt > b.txt\n",
        },
    )


def terminal_bench(folder: Path, config: str = "", /, **files: str | bytes) -> Path:
    """Write the same task in the older format of Terminal-bench. `config` is appended to its task.yaml."""
    return write_folder(
        folder,
        {
            "task.yaml": (
                'instruction: |-\n  Write "Hello, world!" into hello.txt.\nauthor_name: A\ndifficulty: easy\n'
                f"tags: [file]\nparser_name: pytest\nmax_agent_timeout_sec: 60.0\nmax_test_timeout_sec: 120.0\n{config}"
            ),
            "Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "docker-compose.yaml": (
                "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n"
                '    command: ["sh", "-c", "sleep infinity"]\n'
                "    environment:\n      - TEST_DIR=${T_BENCH_TEST_DIR}\n      - GREETING=hi\n"
            ),
            "run-tests.sh": "#!/bin/bash\npython3 -m pytest $TEST_DIR/test_outputs.py -rA\n",
            "tests/test_outputs.py": (
                "import os\nfrom pathlib import Path\n\n\n"
                'def test_content():\n    assert Path("/app/hello.txt").read_text().strip() == "Hello, world!"\n\n\n'
                'def test_environment():\n    assert os.environ["GREETING"] == "hi"\n'
            ),
            "solution.sh": '#!/bin/bash\necho "Hello, world!" > hello.txt\n',
            **files,
        },
    )

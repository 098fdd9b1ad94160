"""Tasks whose result is a patch of a git repository: history without the fix, the agent's patch, and its grading.

Only the patch is carried (copied) to the grading workspace, a few KB instead of the repository. So exported predictions
are exactly what was graded.
"""

import base64
import json
import re
import shlex
from collections.abc import Collection, Sequence
from importlib import resources

from agent_runtime.tasks.instance import valid
from agent_runtime.tasks.loaded_by_python import LOADED_AUTOMATICALLY, METADATA_SUFFIXES, SHADOWED, TEST_FILES
from agent_runtime.tasks.table import Row
from rollout_api.files import TaskFile
from rollout_api.tasks import Task, Timeouts

PATCH_FOLDER = ".rollout-patch"
PATCH = f"{PATCH_FOLDER}/model.patch"
TESTS_FOLDER = ".rollout-tests"
REPORT = f"{TESTS_FOLDER}/report.xml"
REPORT_TESTS = TaskFile(
    path=f"{TESTS_FOLDER}/report_tests.py",
    content=resources.files("agent_runtime.tasks.in_sandbox").joinpath("report_tests.py").read_text("utf-8"),
)
PREPARED = "refs/rollout/prepared"
"""The tree of the prepared working tree. In some images it differs from `base_commit`, because the environment required
changes.
"""

PROMPT = """\
The working directory has the repository {repo}. Resolve this issue in it, in its source files. Hidden tests will judge the \
result; changes of existing tests do not count.

<issue>
{issue}
</issue>"""

_PART_CHARACTERS = 60_000
"""Characters of a command, below the 65,536 of rollout_api.base.Command."""
_FILE_CHARACTERS = 200_000
"""Characters of a hidden file, below the 204,800 of rollout_api.base.LongText."""

_GIT = """\
set -eu
export HOME="$(mktemp -d)" GIT_CONFIG_NOSYSTEM=1
git config --global --add safe.directory '*'
"""
"""git with its own configuration: no setting of the image or the agent affects it."""


def reported(runner: str) -> str:
    """Return the command that runs tests by a runner of REPORT_TESTS, with its arguments, and writes REPORT."""
    return f"python {REPORT_TESTS.path} {REPORT} {runner}"


def scrub_history(*base: str) -> str:
    """Return a setup command that reduces `.git` to the base commit and its ancestors.

    The base is the first given revision that the repository has.

    A new object store with the objects of the base commit replaces the old one. This removes all refs, reflogs,
    stashes, packs, alternates, worktrees, submodules' stores and unreachable objects. Tags of ancestors are kept,
    because packages compute their version from them.
    """
    revisions = " ".join(shlex.quote(revision) for revision in base)
    return f"""{_GIT}
base=
for revision in {revisions}; do
  [ -n "$base" ] || base=$(git rev-parse --verify --quiet "$revision^{{commit}}") || true
done
if [ -z "$base" ]; then
  echo "the repository in $PWD has no commit" {revisions}"; expected the image of this instance in sandbox.workingDir" >&2
  exit 1
fi
new=$(mktemp -d "$PWD/.rollout-git.XXXXXX")
git init --quiet --bare --template= "$new"
{{ echo "$base"; git for-each-ref --merged "$base" --format='%(objectname)' refs/tags; }} > "$new/kept"
git pack-objects --quiet --revs "$new/objects/pack/pack" < "$new/kept" > /dev/null
rm "$new/kept"
git for-each-ref --merged "$base" --format='create %(refname) %(objectname)' refs/tags > "$HOME/tags"
git --git-dir "$new" update-ref --stdin < "$HOME/tags"
old=$(git rev-parse --git-common-dir)
[ ! -f "$old/shallow" ] || cp "$old/shallow" "$new/shallow"
git --git-dir "$new" update-ref refs/heads/main "$base"
git --git-dir "$new" symbolic-ref HEAD refs/heads/main
git --git-dir "$new" config core.bare false
mkdir "$new/info" && echo '/.rollout-*/' > "$new/info/exclude"
rm -rf "$old"
find . -name .git -prune -exec rm -rf {{}} +
mv "$new" .git
git reset --quiet
export GIT_INDEX_FILE="$HOME/index"
# Files that the base commit has are kept, also ignored ones; of a submodule, its files.
git read-tree "$base"
git ls-files --stage | sed -n 's/^160000/0/p' | git update-index --index-info
git add -A
git update-ref {PREPARED} "$(git write-tree)"
mkdir -p {PATCH_FOLDER}
rm -rf "$HOME"
"""


COLLECT_PATCH = f"""{_GIT}
rm -rf {PATCH_FOLDER}
mkdir {PATCH_FOLDER}
export GIT_INDEX_FILE="$HOME/index"
git read-tree {PREPARED}
# It fails at what cannot be in a patch, such as another repository that has no commit yet; all the rest is added.
git add -A --ignore-errors -- . ':!.rollout-*' || [ $? -eq 1 ]
agents=$(git write-tree)
patch() {{
  git "$@" diff-tree -r -p --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \\
    --src-prefix=a/ --dst-prefix=b/ {PREPARED} "$agents" > "$HOME/patch"
}}
patch
# Predictions are JSON, which has no text but UTF-8. In an empty work tree, no file of the repository says what is text.
if LC_ALL=C.UTF-8 grep -aqxv '.*' "$HOME/patch"; then
  echo '* -diff' > "$HOME/attributes"
  mkdir "$HOME/empty"
  store=$(git rev-parse --absolute-git-dir)
  rm -rf "$store/info/attributes" # of the agent; it would have the last word
  export GIT_INDEX_FILE="$HOME/none"
  (cd "$HOME/empty" && patch --git-dir="$store" --work-tree=. -c core.attributesFile="$HOME/attributes")
fi
mv "$HOME/patch" {PATCH}
rm -rf "$HOME"
"""
"""Command that writes the agent's changes as one patch, committed or not, including new files that are not ignored."""


def solution(patch: str) -> list[str]:
    """Return commands that apply a patch of any size."""
    if not patch:
        return []
    encoded = base64.b64encode(patch.encode()).decode()
    parts = [encoded[start : start + _PART_CHARACTERS] for start in range(0, len(encoded), _PART_CHARACTERS)]
    file = '"${TMPDIR:-/tmp}/rollout-solution"'
    writes = [f"printf %s {part} {'>>' if number else '>'} {file}" for number, part in enumerate(parts)]
    return [*writes, f"base64 -d < {file} | git -c safe.directory='*' apply --whitespace=nowarn - && rm {file}"]


def hidden_files(
    base_commit: str, test_patch: str, tests: Collection[str], allowed: Sequence[str]
) -> list[TaskFile | dict[str, str]]:
    """Return the hidden files: the hidden tests, and the program that applies them and the agent's patch.

    Args:
        base_commit: commit with the original tests.
        test_patch: the hidden tests.
        tests: paths that are restored from the base commit first, including those of the hidden tests.
        allowed: paths of the known fix, which the agent may change although Python loads them automatically.
    """
    instance = {
        "base": base_commit,
        "prepared": PREPARED,
        "patch": PATCH,
        "hidden": sorted(tests),
        "artifacts": [".", *allowed],
    }
    parts = [test_patch[start : start + _FILE_CHARACTERS] for start in range(0, len(test_patch), _FILE_CHARACTERS)]
    return [
        *_PROGRAM,
        {"path": f"{TESTS_FOLDER}/instance.json", "content": json.dumps(instance)},
        *({"path": f"{TESTS_FOLDER}/tests.patch.{number}", "content": part} for number, part in enumerate(parts)),
    ]


def task_of_patch(
    *,
    name: str,
    repo: str,
    issue: str,
    setup: Sequence[str],
    patch: str,
    verifier: Row,
    timeouts: Timeouts,
    sandbox: Row,
) -> Task:
    """Return a task to resolve an issue of a repository, whose result is a patch. Raises RowError."""
    graded = {"collect": [COLLECT_PATCH], "artifacts": [PATCH_FOLDER], "reward": "AllOrNothing"}
    return valid(
        {
            "name": name,
            "prompt": PROMPT.format(repo=repo, issue=issue),
            "setup": setup,
            "solution": solution(patch),
            "verifier": verifier | graded,
            "timeouts": timeouts,
            "sandbox": sandbox,
            "tags": [repo],
        }
    )


APPLY_PATCH = f"python {TESTS_FOLDER}/apply_patch.py"
"""Command that applies both in the grading workspace."""


def patched_paths(patch: str) -> list[str]:
    """Return the files of a patch in git's format, before and after it."""
    # Split first, because a regular expression over whole patches is slow.
    headers = (part.partition("\n")[0] for part in f"\n{patch}".split("\ndiff --git ")[1:])
    return [path for header in headers if (found := _HEADER.fullmatch(header)) for path in found.groups()]


_HEADER = re.compile(r'"?a/(.+?)"? "?b/(.+?)"?')

_SOURCES = resources.files("agent_runtime")
_RULES = {
    "names": [*sorted(LOADED_AUTOMATICALLY), ".gitattributes"],
    "modules": sorted(SHADOWED),
    "metadata": METADATA_SUFFIXES,
    "tests": TEST_FILES,
    "options": (),
}
_PROGRAM = tuple(
    TaskFile(path=f"{TESTS_FOLDER}/{name}", content=content)
    for name, content in (
        ("apply_patch.py", _SOURCES.joinpath("tasks/in_sandbox/apply_patch.py").read_text("utf-8")),
        ("tree_rules.py", _SOURCES.joinpath("executor/init/tree_rules.py").read_text("utf-8")),
        ("tree_rules.json", json.dumps(_RULES)),
    )
)
"""Cached, because it is the same for every instance."""

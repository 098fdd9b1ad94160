import dataclasses

from hack.cluster.harness.recipes import ON_REQUEST, RECIPES, Recipe, module_file, staging_modules

GO_MOD = """\
module k8s.io/kubernetes

require (
\tgithub.com/blang/semver/v4 v4.0.0
\tk8s.io/api v0.0.0
\tk8s.io/client-go v0.0.0 // indirect
\tk8s.io/kube-openapi v0.0.0-20250910181357-589584f1c912
)

require k8s.io/kubelet v0.0.0
"""


def test_only_modules_of_the_same_repository_are_replaced() -> None:
    assert staging_modules(GO_MOD) == ["k8s.io/api", "k8s.io/client-go", "k8s.io/kubelet"]


def test_program_module_has_its_version_and_its_repositorys() -> None:
    recipe = Recipe("x", "example.org/x", "1.2.3", {"x": "example.org/x/cmd"}, staging="0.2.3")
    lines = module_file(recipe, ["example.org/y"]).splitlines()
    assert lines[-2:] == ["require example.org/x v1.2.3", "replace example.org/y => example.org/y v0.2.3"]


def test_programs_of_an_older_recipe_are_rebuilt() -> None:
    recipe = RECIPES[0]
    changed = [
        dataclasses.replace(recipe, version="0"),
        dataclasses.replace(recipe, tags="other"),
        dataclasses.replace(recipe, packages={"other": "example.org/other"}),
    ]
    assert len({recipe.folder, *(other.folder for other in changed)}) == 4


def test_no_two_recipes_build_a_program_of_the_same_name() -> None:
    programs = [program for recipe in (*RECIPES, *ON_REQUEST) for program in recipe.packages]
    assert len(programs) == len(set(programs))

"""Images of task folders: names and bases."""

from agent_runtime.tasks.images import image_name, rewritten, with_other_bases


def test_base_images_are_replaced_and_nothing_else() -> None:
    text = (
        "FROM --platform=linux/amd64 ubuntu:24.04 AS x\nRUN echo FROM ubuntu:24.04\n"
        "COPY --from=images.example/u/uv:1 /uv /\nRUN cat <<E >y\nFROM ubuntu:24.04\nE\nFROM x\n"
    )
    bases = {"ubuntu:24.04": "mirror/ubuntu@sha256:1", "images.example/": "mirror/ghcr/"}
    assert with_other_bases(text, bases) == (
        "FROM --platform=linux/amd64 mirror/ubuntu@sha256:1 AS x\nRUN echo FROM ubuntu:24.04\n"
        "COPY --from=mirror/ghcr/u/uv:1 /uv /\nRUN cat <<E >y\nFROM ubuntu:24.04\nE\nFROM x\n"
    )


def test_the_longest_prefix_decides() -> None:
    bases = {"a/": "x/", "a/b/": "y/", "a/b": "whole"}
    assert [rewritten(image, bases) for image in ("a/c:1", "a/b/c", "ab/c", "a/b")] == ["x/c:1", "y/c", "ab/c", "whole"]


def test_entry_without_a_digest_replaces_an_image_that_has_one() -> None:
    bases = {"debian:12": "./roots/debian", "debian:12@sha256:b": "exact", "debian:": "mirror/debian:"}
    images = ("debian:12@sha256:a", "debian:12@sha256:b", "debian:11@sha256:a")
    assert [rewritten(image, bases) for image in images] == ["./roots/debian", "exact", "mirror/debian:11@sha256:a"]


def test_image_name_is_valid_for_a_registry() -> None:
    assert image_name("r/{name}:{digest}", "My Task@1_", "abc") == "r/my-task-1:abc"

"""Images by their names in a registry, pulled by the real skopeo."""

from pathlib import Path

import pytest

from agent_runtime.sandboxes.images.files import ImageError
from agent_runtime.sandboxes.images.store import ImageStore
from tests.support.oci import Layout, layer_tar
from tests.support.registry import Registry


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    made.image([layer_tar({"etc/": b"", "etc/name": b"pulled"})], packed="+gzip", config={"User": "7"})
    return made


def test_a_name_is_pulled_once_and_then_works_without_its_registry(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path, tmp_path / "store")
    with Registry(layout) as registry:
        monkeypatch.setenv("HOME", str(registry.allow(tmp_path / "home")))
        name = f"{registry.host}/tasks/one:v1"
        image = store.unpack(name)
        assert "/v2/tasks/one/manifests/v1" in registry.requests
    assert ((image.layers[0] / "etc/name").read_text(), image.config.user) == ("pulled", "7")
    assert store.unpack(name) == image
    assert store.has(name)


def test_missing_image_in_a_registry_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, tmp_path / "store")
    with pytest.raises(ImageError, match=r"127\.0\.0\.1:1/none:1 cannot be pulled: .*(refused|pinging)"):
        store.unpack("127.0.0.1:1/none:1")
    assert list((tmp_path / "store/pulled").iterdir()) == []

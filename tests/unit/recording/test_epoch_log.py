"""Epochs that every replica finds and one claims."""

from obstore.store import MemoryStore

from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.epoch_log import EpochLog
from agent_runtime.recording.store import Store


async def test_one_of_several_claims_of_an_epoch_wins_and_its_address_is_found() -> None:
    folder = AttemptFolder(Store("memory://", MemoryStore()), "sessions/s")
    assert await folder.latest_claim() is None
    logs = [await EpochLog.claim_after(0, folder, "s", f"http://{i}") for i in range(3)]
    assert [log is not None for log in logs] == [True, False, False]
    claim = await folder.latest_claim()
    assert claim is not None
    assert (claim.epoch, claim.address) == (1, "http://0")
    assert await EpochLog.claim_after(1, folder, "s", "http://2") is not None
    for known in (0, 1, 2):
        claim = await folder.latest_claim(known)
        assert claim is not None
        assert (claim.epoch, claim.address) == (2, "http://2")

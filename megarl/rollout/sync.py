"""New weights into an engine, and the proof that it samples with them."""

from __future__ import annotations

from megarl.rollout.engine import Engine, WeightStream


class SyncFailed(RuntimeError):
    """An engine holds other weights than were sent to it."""


def give_weights(engine: Engine, tensors: WeightStream, version: int) -> None:
    """Pause the engine, let it forget what old weights computed, give it these weights as `version`, and compare the
    fingerprints of what was sent and of what it holds. It goes on sampling whatever happens.

    Raises SyncFailed naming the tensors that differ.
    """
    try:
        engine.pause()
        engine.flush()
        sent = engine.update_weights(tensors, version)
        held = engine.fingerprint()
    finally:
        engine.resume()
    if sent != held:
        different = sorted(n for n in sent.keys() | held.keys() if sent.get(n) != held.get(n))
        raise SyncFailed(
            f"after the sync to version {version} the engine holds other weights than were sent: "
            f"{len(different)} of {len(sent)} tensors differ, first {different[0]!r}"
        )

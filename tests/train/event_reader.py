"""Reads event files the way a viewer does: record by record, checking the sums."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


def read_events(folder):
    """[(step, {tag: value})] of all event files of a folder, in order."""
    events = []
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            head, (length,) = data[:8], struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(head)
            body = data[12 : 12 + length]
            (check,) = struct.unpack("<I", data[12 + length : 16 + length])
            assert check == masked_crc32c(body)
            event = Event.FromString(body)
            if not event.file_version:
                values = {v.tag: v.simple_value for v in event.summary.value}
                events.append((event.step, values))
            data = data[16 + length :]
    return events

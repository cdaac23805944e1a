"""Durations as people read them."""


def duration(seconds: float) -> str:
    """Return seconds in their two largest units: `45 s`, `3 min 20 s`, `11 h 07 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

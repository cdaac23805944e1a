"""Durations as people read them."""


def duration(seconds: float) -> str:
    """Return seconds in their two largest units: `45 s`, `3 min 20 s`, `11 h 07 min`, `3 d 11 h`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

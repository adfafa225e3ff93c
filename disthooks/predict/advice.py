from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    title: str = ""
    text: str = ""

    def to_dict(self):
        return {}


def cheapest(*a):
    return None

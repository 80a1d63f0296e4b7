"""A reward for sums that end in brackets, as `13 10 12: [1203]`."""


def boxed(completions, answer, **_):
    """1 where the completion ends with the answer in brackets, else 0."""
    return [float(text.strip().endswith(f"[{right}]")) for text, right in zip(completions, answer, strict=True)]

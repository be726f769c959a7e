"""What counts as one clear sentence for the person at the screen."""

import re


def is_one_sentence(message):
    """One line that begins like a sentence, says something and does not go on with a second one."""
    plain = re.sub(r"'[^']*'", "''", message)  # what is quoted comes from the user
    return (
        len(message) >= 12 and "\n" not in message and "Traceback" not in message and not re.search(r"\. [A-Z]", plain)
    )

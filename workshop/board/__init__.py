"""The board of a class: which goals the learners have met, who waits, and which mistake most have (``workshop board``)."""

"""To whom: messages between ranks, whatever carries them."""

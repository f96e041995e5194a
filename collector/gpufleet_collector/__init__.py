"""The judge: stores what agents send and says what is wrong."""

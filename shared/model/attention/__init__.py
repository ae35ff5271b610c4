"""The kinds of attention, one module each. ``kind`` says what every one of them must answer."""

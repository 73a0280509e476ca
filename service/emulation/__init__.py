"""The command `spd-emulate`: what a pipeline would be worth, on devices that only wait."""

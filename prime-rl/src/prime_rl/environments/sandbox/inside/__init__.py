"""What runs inside the sandbox. Standard library only: it is started as a script, without our package."""

"""The command line: parse, call one library function, print. Nothing outside this package prints or draws."""

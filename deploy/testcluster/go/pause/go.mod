module rljob.dev/tests/pause

go 1.26

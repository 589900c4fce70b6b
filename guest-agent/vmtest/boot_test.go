package vmtest

import "testing"

func TestBoot(t *testing.T) {
	m := sharedMachine(t)
	r := m.configure(t)
	t.Log(r)
	t.Log(m.console.String())
}

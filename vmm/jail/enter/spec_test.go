package enter

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestRead(t *testing.T) {
	good := func() *Spec {
		return &Spec{Parent: 2, Root: "/srv/qemu", UID: 1 << 20, Argv: []string{"/bin/x"}, Keep: 5, Cgroups: []int{6, 7}, NetNS: 8, Tap: 5,
			Trees: []Tree{{FD: 9, Path: "0/file"}}, Caps: []int{1}, MaxFiles: 64}
	}
	for name, spoil := range map[string]func(*Spec){
		"":                 func(*Spec) {},
		"no parent":        func(s *Spec) { s.Parent = 0 },
		"init as parent":   func(s *Spec) { s.Parent = 1 },
		"relative root":    func(s *Spec) { s.Root = "qemu" },
		"the host's root":  func(s *Spec) { s.Root = "/../" },
		"root as uid":      func(s *Spec) { s.UID = 0 },
		"a system's uid":   func(s *Spec) { s.UID = 999 },
		"no command":       func(s *Spec) { s.Argv = nil },
		"relative command": func(s *Spec) { s.Argv[0] = "x" },
		"no output kept":   func(s *Spec) { s.Keep, s.Tap = 1, 0 },
		"tap not kept":     func(s *Spec) { s.Tap = 6 },
		"tap as output":    func(s *Spec) { s.Tap = 2 },
		"negative tap":     func(s *Spec) { s.Tap = -1 },
		"kept cgroup":      func(s *Spec) { s.Cgroups[1] = 5 },
		"kept namespace":   func(s *Spec) { s.NetNS = 4 },
		"kept tree":        func(s *Spec) { s.Trees[0].FD = 5 },
		"tree outside":     func(s *Spec) { s.Trees[0].Path = "../etc" },
		"tree as the root": func(s *Spec) { s.Trees[0].Path = "." },
		"absolute tree":    func(s *Spec) { s.Trees[0].Path = "/etc" },
		"unclean tree":     func(s *Spec) { s.Trees[0].Path = "a//b" },
		"CAP_KILL":         func(s *Spec) { s.Caps[0] = 5 },
		"no capability":    func(s *Spec) { s.Caps[0] = -1 },
		"too few files":    func(s *Spec) { s.MaxFiles = 5 },
	} {
		s := good()
		spoil(s)
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Read(strings.NewReader(string(b))); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, bad := range []string{"", "{", "[]", `{"uid": -1}`, strings.Repeat(" ", maxSpec+1)} {
		if _, err := Read(strings.NewReader(bad)); err == nil {
			t.Errorf("%.20q was taken", bad)
		}
	}
}

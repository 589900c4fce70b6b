package sandbox

import "testing"

// TestOwned: what a team has pulled as a user of a registry is its alone, until it is everybody's.
func TestOwned(t *testing.T) {
	for _, c := range []struct {
		labels map[string]string
		want   bool
	}{
		{nil, true}, {map[string]string{"io.other": "x"}, true}, {map[string]string{ownLabel + "blue": "true"}, true},
		{map[string]string{ownLabel + "red": "true"}, false}, {map[string]string{ownLabel + "red": "true", ownLabel + "blue": "true"}, true},
	} {
		if got := owned(c.labels, "blue"); got != c.want {
			t.Errorf("%v: %v", c.labels, got)
		}
	}
	if l := (Fetch{Team: "blue", User: "u", Secret: "s"}).labels(nil); l[ownLabel+"blue"] == "" || len(l) != 1 {
		t.Errorf("pulled as somebody: %v", l)
	}
	if l := (Fetch{Team: "blue"}).labels(nil); len(l) != 0 {
		t.Errorf("pulled as nobody: %v", l)
	}
}

// TestCredentials: they are for the image's own registry, not for those that stand in for it.
func TestCredentials(t *testing.T) {
	for _, c := range []struct {
		image, host string
		want        bool
	}{
		{"docker.io/library/debian:latest", "registry-1.docker.io", true}, {"docker.io/library/debian:latest", "mirror.example", false},
		{"registry.example:5000/a:b", "registry.example:5000", true}, {"registry.example:5000/a:b", "registry.example", false},
	} {
		user, secret, err := PullOptions{User: "u", Secret: "s"}.credentials(c.image)(c.host)
		if err != nil || (user == "u" && secret == "s") != c.want || (user == "") == c.want {
			t.Errorf("%s at %s: %q, %v", c.image, c.host, user, err)
		}
	}
}

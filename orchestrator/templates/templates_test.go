package templates

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// TestBuildRefuses: what can't become a template is refused before anything is made of it.
func TestBuildRefuses(t *testing.T) {
	for want, r := range map[string]Request{
		"name":                      {Name: "A b", CPUs: 1, MemoryMB: 512},
		"CPUs and memory":           {Name: "a", MemoryMB: 512},
		"that would be ready":       {Name: "a", CPUs: 1, MemoryMB: 512, Ready: "true"},
		"would serve the init hook": {Name: "a", CPUs: 1, MemoryMB: 512, Hook: &db.Hook{Port: 80, Path: "/"}},
		"port can't be 49983":       {Name: "a", CPUs: 1, MemoryMB: 512, Run: "true", Hook: &db.Hook{Port: 49983, Path: "/"}},
		"port can't be 65536":       {Name: "a", CPUs: 1, MemoryMB: 512, Run: "true", Hook: &db.Hook{Port: 65536, Path: "/"}},
		`path can't be "who"`:       {Name: "a", CPUs: 1, MemoryMB: 512, Run: "true", Hook: &db.Hook{Port: 80, Path: "who"}},
		`path can't be "/a?b"`:      {Name: "a", CPUs: 1, MemoryMB: 512, Run: "true", Hook: &db.Hook{Port: 80, Path: "/a?b"}},
	} {
		if _, err := (&Builder{}).Build(t.Context(), r); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

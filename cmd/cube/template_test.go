package main

import (
	"slices"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/api"
)

// TestRebuildable: all of a team's builds are made again that can be asked for, each once, whatever its tags are.
func TestRebuildable(t *testing.T) {
	got := rebuildable([]api.Template{
		{Team: "blue", Names: []string{"app"}, Tags: []api.Tag{{Name: "latest", Build: "2"}, {Name: "v1", Build: "1"}, {Name: "v2", Build: "2"}}},
		{Team: "blue", Names: []string{"never"}}, {Team: "blue", Tags: []api.Tag{{Name: "default", Build: "3"}}},
		{Team: "green", Names: []string{"app"}, Tags: []api.Tag{{Name: "default", Build: "4"}}},
	}, "blue")
	if want := []string{"app:latest", "app:v1"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

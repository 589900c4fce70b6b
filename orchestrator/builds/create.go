package builds

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// What sandboxes have whose template says nothing, and the bounds of what a template may say.
const (
	defaultCPUs     = 2
	defaultMemoryMB = 1024
	maxCPUs         = 32
	minMemoryMB     = 128
	maxFreeDiskMB   = 1 << 16
	maxTags         = 32
)

// Request asks for a build of a template.
type Request struct {
	Team string `json:"team"`
	// Name is the template's, NAME[:TAG], with the team before it or not. There need be no template of it.
	Name string `json:"name"`
	// Tags are others that are to stand for the build; none at all is the default one.
	Tags []string `json:"tags,omitempty"`
	// Public: all teams may use the template from now on.
	Public bool `json:"public,omitempty"`
	// CPUs and MemoryMB are those of its sandboxes, 0 as many as usual. FreeDiskMB is what their disks have beyond the usual, and
	// DiskMB, unless it is 0, what they have in all.
	CPUs       int `json:"cpus,omitempty"`
	MemoryMB   int `json:"memory_mb,omitempty"`
	FreeDiskMB int `json:"free_disk_mb,omitempty"`
	DiskMB     int `json:"disk_mb,omitempty"`
}

// Created is a build that waits for what is to be built.
type Created struct {
	Template, Build, Name string
	Public                bool
	Tags                  []string
	CPUs                  int
	MemoryMB, DiskMB      int
}

// Create writes down that a build of a template is asked for, and makes the template if there is none. What the team has too many of
// is errdefs.ErrResourceExhausted, a snapshot's name errdefs.ErrAlreadyExists, another team's errdefs.ErrPermissionDenied.
func (s *Service) Create(ctx context.Context, r Request) (Created, error) {
	if err := s.ready(); err != nil {
		return Created{}, err
	}
	ref, err := db.ParseRef(r.Name)
	if err != nil {
		return Created{}, fmt.Errorf("name: %w", err)
	}
	if ref.Team != "" && ref.Team != r.Team {
		return Created{}, errdefs.ErrPermissionDenied.WithMessage(fmt.Sprintf("name: '%s' is of another team", ref))
	}
	c := Created{Build: uuid.NewString(), Name: ref.Name, CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB}
	if c.Tags, err = tagsOf(ref.Tag, r.Tags); err != nil {
		return Created{}, err
	}
	if err := s.size(&c, r.FreeDiskMB); err != nil {
		return Created{}, err
	}
	limits, _ := s.Limits.Of(r.Team)
	c.Template, err = s.db.CreateJob(ctx, db.JobRequest{
		ID: c.Build, Team: r.Team, Name: ref.Name, Template: newTemplateID(), Public: r.Public, Tags: c.Tags, CPUs: c.CPUs, MemoryMB: c.MemoryMB, DiskMB: c.DiskMB,
		MaxTemplates: limits.Templates, MaxJobs: limits.Builds, Expired: Reason{Message: "nobody has said what is to be built"}.encode(),
		Replaced: Reason{Message: "another build by the same tag was asked for before this one was told what is to be built"}.encode(),
	})
	if err != nil {
		return Created{}, err
	}
	t, err := s.db.Template(ctx, r.Team, db.Ref{Name: c.Template})
	c.Public = t.Public
	return c, err
}

// newTemplateID is an id that no template has: 20 random letters and digits.
func newTemplateID() string { return strings.ToLower(rand.Text())[:20] }

// tagsOf are those that are to stand for a build: each once.
func tagsOf(first string, more []string) (tags []string, err error) {
	if first != "" {
		tags = []string{first}
	}
	for i, t := range more {
		if err := db.ParseTag(t); err != nil {
			return nil, fmt.Errorf("tags[%d]: %w", i, err)
		}
		if !slices.Contains(tags, t) {
			tags = append(tags, t)
		}
	}
	switch {
	case len(tags) == 0:
		return []string{db.DefaultTag}, nil
	case len(tags) > maxTags:
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("tags: there are %d, there can be %d", len(tags), maxTags))
	}
	return tags, nil
}

// size completes and checks what the sandboxes have. Of the messages, those of CPUs and of what memory is divisible by are E2B's to
// the letter.
func (s *Service) size(c *Created, freeDiskMB int) error {
	if c.CPUs == 0 {
		c.CPUs = defaultCPUs
		if s.MaxCPUs > 0 {
			c.CPUs = min(c.CPUs, s.MaxCPUs)
		}
	}
	if c.MemoryMB == 0 {
		c.MemoryMB = defaultMemoryMB
		if s.MaxMemoryMB > 0 {
			c.MemoryMB = min(c.MemoryMB, s.MaxMemoryMB&^1)
		}
	}
	if c.DiskMB == 0 {
		c.DiskMB = s.DiskMB + freeDiskMB
	}
	switch {
	case c.CPUs != 1 && c.CPUs%2 != 0 || c.CPUs < 1:
		return bad("cpuCount: CPU count must be 1 or an even number")
	case c.CPUs > maxCPUs:
		return bad("cpuCount: CPU count must be at most %d", maxCPUs)
	case s.MaxCPUs > 0 && c.CPUs > s.MaxCPUs:
		return bad("cpuCount: %d are more than a sandbox may have here, which is %d (vm.max_vcpus)", c.CPUs, s.MaxCPUs)
	case c.MemoryMB < minMemoryMB:
		return bad("memoryMB: Memory must be at least %d MiB", minMemoryMB)
	case c.MemoryMB%2 != 0:
		return bad("memoryMB: Memory must be divisible by 2")
	case s.MaxMemoryMB > 0 && c.MemoryMB > s.MaxMemoryMB:
		return bad("memoryMB: %d are more than a sandbox may have here, which is %d (vm.max_memory)", c.MemoryMB, s.MaxMemoryMB)
	case freeDiskMB < 0 || freeDiskMB > maxFreeDiskMB:
		return bad("minFreeDiskMb: %d is out of range, it must be from 0 to %d", freeDiskMB, maxFreeDiskMB)
	}
	return nil
}

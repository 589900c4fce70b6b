package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/docker/go-units"
)

// Admission is how much of the host sandboxes may take.
type Admission struct {
	// MemoryHeadroom is memory of the host's that no machine gets.
	MemoryHeadroom Size `toml:"memory_headroom"`
	// CPUOvercommit, MemoryOvercommit and DiskOvercommit are by how much a disposable sandbox has more than is reserved for it, 1 is
	// not at all.
	CPUOvercommit    float64 `toml:"cpu_overcommit"`
	MemoryOvercommit float64 `toml:"memory_overcommit"`
	DiskOvercommit   float64 `toml:"disk_overcommit"`
	// DisposableMemory is what is reserved for a disposable sandbox in any case, as far as it has so much.
	DisposableMemory Size `toml:"disposable_memory"`
	// CPUPressure, MemoryPressure and IOPressure are the shares of ten seconds, in percent, in which something on the host has
	// waited for that, from which on no machine is started; 0 = it doesn't matter.
	CPUPressure    int `toml:"cpu_pressure"`
	MemoryPressure int `toml:"memory_pressure"`
	IOPressure     int `toml:"io_pressure"`
}

func defaultAdmission() Admission {
	return Admission{MemoryHeadroom: 256 * units.MiB, CPUOvercommit: 64, MemoryOvercommit: 8, DiskOvercommit: 64, DisposableMemory: 96 * units.MiB, MemoryPressure: 20}
}

func (a *Admission) validate() error {
	for key, v := range map[string]float64{"cpu_overcommit": a.CPUOvercommit, "memory_overcommit": a.MemoryOvercommit, "disk_overcommit": a.DiskOvercommit} {
		if !(v >= 1 && v <= 1000) { // nor is NaN
			return fmt.Errorf("admission.%s = %v must be between 1 and 1000", key, v)
		}
	}
	for key, v := range map[string]int{"cpu_pressure": a.CPUPressure, "memory_pressure": a.MemoryPressure, "io_pressure": a.IOPressure} {
		if v < 0 || v > 100 {
			return fmt.Errorf("admission.%s = %d must be between 0 and 100 percent", key, v)
		}
	}
	if a.DisposableMemory < units.MiB {
		return fmt.Errorf("admission.disposable_memory = %s must be at least 1MiB", a.DisposableMemory)
	}
	return nil
}

// Limits bound what one team has; 0 = nothing does.
type Limits struct {
	// Running is how many sandboxes run at once, VCPUs and Memory are of all that run, Disk is of those that are paused, too.
	Running int  `toml:"running"`
	VCPUs   int  `toml:"vcpus"`
	Memory  Size `toml:"memory"`
	Disk    Size `toml:"disk"`
	// Snapshots is how many snapshots of sandboxes there are.
	Snapshots int `toml:"snapshots"`
	// Templates is how many templates there are, Builds how many builds of them that aren't over.
	Templates int `toml:"templates"`
	Builds    int `toml:"builds"`
	// CreatesPerMinute is how many sandboxes are made in a minute, forks included, CreateBurst how many of them at once.
	CreatesPerMinute int `toml:"creates_per_minute"`
	CreateBurst      int `toml:"create_burst"`
	// Team has those of teams that have others, by name.
	Team map[string]TeamLimits `toml:"team"`
}

// TeamLimits are a team's own. What is nil is as for all teams.
type TeamLimits struct {
	Running          *int  `toml:"running"`
	VCPUs            *int  `toml:"vcpus"`
	Memory           *Size `toml:"memory"`
	Disk             *Size `toml:"disk"`
	Snapshots        *int  `toml:"snapshots"`
	Templates        *int  `toml:"templates"`
	Builds           *int  `toml:"builds"`
	CreatesPerMinute *int  `toml:"creates_per_minute"`
	CreateBurst      *int  `toml:"create_burst"`
}

func defaultLimits() Limits { return Limits{Templates: 100, Builds: 8, CreateBurst: 20} }

// maxCreates is more than any host makes in a minute.
const maxCreates = 1_000_000

var teamName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

func (l *Limits) validate() error {
	if err := l.check("limits"); err != nil {
		return err
	}
	for _, team := range slices.Sorted(maps.Keys(l.Team)) {
		if err := validTeam("limits", team); err != nil {
			return err
		}
		own, _ := l.Of(team)
		if err := own.check("limits.team." + team); err != nil {
			return err
		}
	}
	return nil
}

// validTeam refuses what no team is called by: nobody would have what a section says of it.
func validTeam(section, team string) error {
	if !teamName.MatchString(team) {
		return fmt.Errorf("%s.team.%s: a team's name is of a-z, 0-9, - and _", section, team)
	}
	return nil
}

func (l *Limits) check(section string) error {
	for key, v := range map[string]int64{
		"running": int64(l.Running), "vcpus": int64(l.VCPUs), "memory": int64(l.Memory), "disk": int64(l.Disk), "snapshots": int64(l.Snapshots),
		"templates": int64(l.Templates), "builds": int64(l.Builds), "creates_per_minute": int64(l.CreatesPerMinute),
	} {
		if v < 0 {
			return fmt.Errorf("%s.%s = %d must be 0 or more", section, key, v)
		}
	}
	if l.CreatesPerMinute > maxCreates {
		return fmt.Errorf("%s.creates_per_minute = %d must be at most %d", section, l.CreatesPerMinute, maxCreates)
	}
	if l.CreateBurst < 1 {
		return fmt.Errorf("%s.create_burst = %d must be at least 1", section, l.CreateBurst)
	}
	return nil
}

// Of are a team's limits, and the keys of those that are its own.
func (l *Limits) Of(team string) (limits Limits, own map[string]bool) {
	limits, own = *l, map[string]bool{}
	limits.Team = nil
	t := l.Team[team]
	override(&limits.Running, t.Running, own, "running")
	override(&limits.VCPUs, t.VCPUs, own, "vcpus")
	override(&limits.Memory, t.Memory, own, "memory")
	override(&limits.Disk, t.Disk, own, "disk")
	override(&limits.Snapshots, t.Snapshots, own, "snapshots")
	override(&limits.Templates, t.Templates, own, "templates")
	override(&limits.Builds, t.Builds, own, "builds")
	override(&limits.CreatesPerMinute, t.CreatesPerMinute, own, "creates_per_minute")
	override(&limits.CreateBurst, t.CreateBurst, own, "create_burst")
	return limits, own
}

func override[T any](to *T, with *T, own map[string]bool, key string) {
	if with != nil {
		*to, own[key] = *with, true
	}
}

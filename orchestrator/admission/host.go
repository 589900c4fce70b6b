package admission

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/meminfo"
	"github.com/cubesandbox/cube/internal/space"
)

// Reading is what a host has at a moment; sizes are in bytes.
type Reading struct {
	CPUs int
	// MemoryAvailable is what can be used without swapping.
	MemoryTotal, MemoryAvailable int64
	// DiskTotal is what the store may come to have in it, DiskFree what of that isn't in use.
	DiskTotal, DiskFree int64
	Pressure            Pressure
}

// Pressure is of what share of the last ten seconds, in percent, something on the host has waited for each.
type Pressure struct {
	CPU, Memory, IO float64
	// Known: the kernel tells (CONFIG_PSI, and not psi=0).
	Known bool
}

// Host is what there is to share out.
type Host interface {
	Read() (Reading, error)
	// CPUUsed is how many CPUs have been busy since it was asked for before, or since the boot.
	CPUUsed() (float64, error)
}

// Proc reads this host.
type Proc struct {
	cfg *config.Config
	dir string // /proc

	mu   sync.Mutex
	last sample // zero: none yet
	used float64
}

// sample is of all CPUs' time since the boot, in ticks.
type sample struct {
	at          time.Time
	busy, total uint64
}

// NewProc reads the host of that configuration.
func NewProc(cfg *config.Config) *Proc { return &Proc{cfg: cfg, dir: "/proc"} }

// Read reads it.
func (p *Proc) Read() (r Reading, err error) {
	m, err := meminfo.Read()
	if err != nil {
		return r, err
	}
	room, err := space.Of(p.cfg.StoreDir())
	if err != nil {
		return r, err
	}
	r = Reading{CPUs: runtime.NumCPU(), MemoryTotal: m.Total, MemoryAvailable: m.Available}
	r.DiskTotal = room.Size / 100 * int64(p.cfg.Store.HighWatermark)
	r.DiskFree = max(r.DiskTotal-(room.Size-room.Free), 0)
	r.Pressure, err = p.pressure()
	return r, err
}

func (p *Proc) pressure() (all Pressure, err error) {
	for name, to := range map[string]*float64{"cpu": &all.CPU, "memory": &all.Memory, "io": &all.IO} {
		b, err := os.ReadFile(p.dir + "/pressure/" + name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EOPNOTSUPP) {
			return Pressure{}, nil
		}
		if err != nil {
			return all, err
		}
		if *to, err = some(string(b)); err != nil {
			return all, fmt.Errorf("%s/pressure/%s: %w", p.dir, name, err)
		}
	}
	all.Known = true
	return all, nil
}

// some is the average of ten seconds of a file of the kernel's (Documentation/accounting/psi.rst).
func some(text string) (float64, error) {
	line, _, _ := strings.Cut(text, "\n")
	rest, ok := strings.CutPrefix(line, "some avg10=")
	value, _, _ := strings.Cut(rest, " ")
	f, err := strconv.ParseFloat(value, 64)
	if !ok || err != nil || !(f >= 0 && f <= 100) {
		return 0, fmt.Errorf("%q is no pressure", line)
	}
	return f, nil
}

// usedApart is the least time that CPUUsed is of.
const usedApart = time.Second

// CPUUsed is of Host. What is asked for again within usedApart is answered as before.
func (p *Proc) CPUUsed() (float64, error) {
	b, err := os.ReadFile(p.dir + "/stat")
	if err != nil {
		return 0, err
	}
	s, err := parseStat(string(b))
	if err != nil {
		return 0, fmt.Errorf("%s/stat: %w", p.dir, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.at.Sub(p.last.at) < usedApart || s.total <= p.last.total || s.busy < p.last.busy {
		return p.used, nil
	}
	p.used = float64(s.busy-p.last.busy) / float64(s.total-p.last.total) * float64(runtime.NumCPU())
	p.last = s
	return p.used, nil
}

// parseStat reads the first line of /proc/stat: cpu user nice system idle iowait irq softirq steal …, of which iowait and idle are
// idle, and guests' time is in user's.
func parseStat(text string) (s sample, err error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return s, fmt.Errorf("%q isn't the time of the CPUs", line)
	}
	s.at = time.Now()
	for i, f := range fields[1:9] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return s, fmt.Errorf("%q isn't the time of the CPUs", line)
		}
		s.total += n
		if i != 3 && i != 4 {
			s.busy += n
		}
	}
	return s, nil
}

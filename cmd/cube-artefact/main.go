// Command cube-artefact turns unpacked Debian packages into what Cube's machines are made of. The set-up scripts call it.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/guestimage"
)

func main() {
	// Artefacts are read by machines' uids; the caller's umask must not matter.
	unix.Umask(0o022)
	app := &cli.App{
		Name:  "cube-artefact",
		Usage: "make Cube's artefacts from unpacked Debian packages",
		Commands: []*cli.Command{
			{
				Name:   "qemu",
				Usage:  "QEMU with its libraries and firmware; prints the new directory",
				Flags:  []cli.Flag{out, packages, path("root", "unpacked packages of QEMU and all it depends on")},
				Action: qemu,
			},
			{
				Name:  "guest",
				Usage: "kernel, initramfs and modules image; prints the new directory",
				Flags: []cli.Flag{
					out, packages, path("kernel", "unpacked kernel package, after depmod"), path("crun", "unpacked packages of crun and all it depends on"),
					path("agent", "the agent's static binary"), &cli.StringFlag{Name: "release", Usage: "the kernel's release", Required: true},
				},
				Action: guest,
			},
		},
	}
	if err := app.Run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "cube-artefact:", err)
		os.Exit(1)
	}
}

var (
	out      = path("out", "directory that the artefact is put in, under its digest")
	packages = path("packages", "file with a package and its version per line")
)

func path(name, usage string) cli.Flag {
	return &cli.PathFlag{Name: name, Usage: usage, Required: true}
}

func qemu(c *cli.Context) error {
	versions, err := readVersions(c.Path("packages"))
	if err != nil {
		return err
	}
	dir, err := artefact.QEMU(c.Path("out"), artefact.Sysroot(c.Path("root")), versions)
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}

func guest(c *cli.Context) error {
	versions, err := readVersions(c.Path("packages"))
	if err != nil {
		return err
	}
	dir, err := guestimage.Publish(c.Path("out"), guestimage.Input{
		Release:  c.String("release"),
		Kernel:   artefact.Sysroot(c.Path("kernel")),
		Crun:     artefact.Sysroot(c.Path("crun")),
		Agent:    c.Path("agent"),
		Packages: versions,
	})
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}

// readVersions reads lines of a package, its version and possibly more.
func readVersions(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	versions := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			return nil, fmt.Errorf("%s: %q is not a package and its version", file, lines.Text())
		}
		versions[fields[0]] = fields[1]
	}
	return versions, lines.Err()
}
